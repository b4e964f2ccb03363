//! One step of one table as the caller gave it, and what is checked before anything changes.

use std::sync::Arc;

use crate::calls::{MAX_STEP, Step};
use crate::config::NanPolicy;
use crate::rows::gradient::{GradientChunk, Gradients, MergedGradients};
use crate::table::bounds::bounds_of_sums;
use crate::table::engine::Engine;
use crate::table::table::Table;
use crate::{Error, Result};

pub(super) const OPERATION: &str = "emb_update";

/// One step of one table, as the caller gave it.
pub(crate) struct StepRequest<'a> {
    pub(crate) table: Arc<Table>,
    pub(crate) gradients: Gradients<'a>,
    pub(crate) step: Step,
}

impl<'a> StepRequest<'a> {
    /// Checks everything but the gradients' values.
    pub(crate) fn new(table: Arc<Table>, chunks: &[GradientChunk<'a>], step: Step) -> Result<Self> {
        if matches!(step, Step::At(step) if !(1..=MAX_STEP).contains(&step)) {
            return Err(Error::InvalidStep { table: table.name.clone() });
        }
        let gradients = Gradients::new(table.config.dim, chunks);
        for (part, start) in gradients.parts.iter().zip(gradients.original_starts()) {
            table.check_ids(OPERATION, part.ids).map_err(|error| error.shifted(start))?;
            if part.row_of.is_empty() && part.stride == table.config.dim && !part.ids.is_empty() {
                table.check_width(OPERATION, "gradient rows", part.ids.len(), part.gradients.len())?;
            }
        }
        gradients.validate(OPERATION, || format!("table \"{}\"", table.name))?;
        table.check_writable(OPERATION, gradients.len())?;
        Ok(Self { table, gradients, step })
    }
}

/// A step whose gradients are known to be finite, or merged without those that are not.
pub(crate) struct CheckedStep<'a> {
    pub(super) table: &'a Arc<Table>,
    pub(super) gradients: &'a Gradients<'a>,
    /// What takes the place of `gradients`.
    pub(super) merged: Option<MergedGradients>,
    pub(super) step: Step,
    pub(super) skipped: usize,
}

/// Checks the values of all gradients.
pub(crate) fn check<'a>(engine: Engine<'_>, requests: &'a [StepRequest<'a>]) -> Result<Vec<CheckedStep<'a>>> {
    let to_check = requests.iter().map(|request| {
        let is_checked = request.table.config.nan_policy != NanPolicy::Allow;
        is_checked.then_some(&request.gradients)
    });
    let bounds = bounds_of_sums(engine, &to_check.collect::<Vec<_>>());
    requests.iter().zip(bounds).map(|(request, bound)| request.check(engine, bound)).collect()
}

impl<'a> StepRequest<'a> {
    /// `bound` is that of the magnitude of every sum of gradients.
    fn check(&'a self, engine: Engine<'_>, bound: f64) -> Result<CheckedStep<'a>> {
        let mut checked = CheckedStep {
            table: &self.table,
            gradients: &self.gradients,
            merged: None,
            step: self.step,
            skipped: 0,
        };
        if self.table.config.nan_policy == NanPolicy::Allow || bound < f64::from(f32::MAX) {
            return Ok(checked);
        }
        // Rare: something is not finite, or so large that a sum may not be.
        if self.table.config.nan_policy == NanPolicy::Error {
            self.check_each_gradient()?;
        }
        // A gradient that is not finite leaves its id without a finite sum: under `skip` the id takes no step, whether
        // its gradients come one by one or merged.
        let merged = self.gradients.merged(engine.executor, engine.simd);
        let refused = self.table.check_finite(OPERATION, "summed gradient", &merged.ids, &merged.sums);
        let refused = refused.map_err(|error| {
            let of_ids = |id| (0..self.gradients.len()).find(|&position| self.gradients.id(position) == id);
            error.at_first_of_its_id(|id| {
                of_ids(id).map(|position| self.gradients.original_position(position))
            })
        })?;
        checked.skipped = refused.len();
        checked.merged = Some(merged.without(&refused, self.gradients.dim));
        Ok(checked)
    }

    fn check_each_gradient(&self) -> Result<()> {
        let Some(found) = self.gradients.not_finite() else { return Ok(()) };
        let row = vec![found.value; self.gradients.dim];
        let checked = self.table.check_finite(OPERATION, "gradient", &[found.id], &row);
        checked.map(drop).map_err(|error| error.shifted(found.position))
    }
}
