//! Which ids get a row by training.

use super::ids::id_lines::IdLines;
use super::ids::row_index::RowIndex;
use crate::config::AdmissionConfig;
use crate::lifecycle::{Sketch, halved};

/// What decides, and what it counted of ids without a row.
#[derive(Debug)]
pub(super) enum Admission {
    Count { threshold: u32, counts: IdLines },
    Sketch { threshold: u32, sketch: Sketch },
    Probability(f64),
}

/// What was counted, for a checkpoint: of each id, or the counters of a sketch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct AdmissionCounts {
    /// Empty for a sketch.
    pub(crate) ids: Vec<i64>,
    pub(crate) counts: Vec<u32>,
}

impl AdmissionCounts {
    /// Returns the same with the ids in ascending order: that of a map is another in each process.
    pub(crate) fn sorted(&self) -> Self {
        let mut both: Vec<_> = self.ids.iter().copied().zip(self.counts.iter().copied()).collect();
        if both.is_empty() {
            return self.clone();
        }
        both.sort_unstable();
        let (ids, counts) = both.into_iter().unzip();
        Self { ids, counts }
    }
}

impl Admission {
    pub(super) fn new(config: &AdmissionConfig) -> Self {
        match *config {
            AdmissionConfig::Count { threshold, .. } => Self::Count { threshold, counts: IdLines::default() },
            AdmissionConfig::Sketch { threshold, epsilon, delta, .. } => {
                Self::Sketch { threshold, sketch: Sketch::new(epsilon, delta) }
            }
            AdmissionConfig::Probability { probability, .. } => Self::Probability(probability),
        }
    }

    /// Counts an id that a step updates, and returns whether it gets a row. `noise` is uniform, of this id and step.
    pub(super) fn admits(&mut self, id: i64, noise: impl FnOnce() -> u64) -> bool {
        match self {
            Self::Count { threshold, counts } => {
                let is_admitted = counts.count(id) >= *threshold;
                if is_admitted {
                    counts.remove(id);
                }
                is_admitted
            }
            Self::Sketch { threshold, sketch } => sketch.count(id) >= *threshold,
            Self::Probability(probability) => unit(noise()) < *probability,
        }
    }

    /// For each of some distinct ids, whether [`Admission::admits`] would be true of it if it was asked of one after
    /// another. None is counted.
    pub(super) fn would_admit(&self, ids: &[i64], noise: impl Fn(i64) -> u64) -> Vec<bool> {
        match self {
            Self::Count { threshold, counts } => {
                let count = |id: &i64| counts.find(*id).map_or(0, |count| count.0).saturating_add(1);
                ids.iter().map(|id| count(id) >= *threshold).collect()
            }
            Self::Sketch { threshold, sketch } => {
                // Ids share counters: each is asked as if those before it had been counted.
                sketch.counts_in_turn(ids).iter().map(|count| count >= threshold).collect()
            }
            Self::Probability(probability) => ids.iter().map(|id| unit(noise(*id)) < *probability).collect(),
        }
    }

    /// Whether an id without a row is counted already, by itself.
    pub(super) fn is_candidate(&self, id: i64) -> bool {
        matches!(self, Self::Count { counts, .. } if counts.find(id).is_some())
    }

    /// Forgets what was counted of an id, as far as it can be told apart.
    pub(super) fn forget(&mut self, id: i64) {
        if let Self::Count { counts, .. } = self {
            counts.remove(id);
        }
    }

    /// Forgets all that was counted of an id, also where that cannot be told apart from what was counted of others: these
    /// may have been counted more often than is known then.
    pub(super) fn erase(&mut self, id: i64) {
        match self {
            Self::Count { counts, .. } => _ = counts.remove(id),
            Self::Sketch { sketch, .. } => sketch.forget(id),
            Self::Probability(_) => {}
        }
    }

    /// Halves what was counted so many times, and forgets ids whose count is zero.
    pub(super) fn halve(&mut self, times: u32) {
        match self {
            Self::Count { counts, .. } => *counts = halved_counts(counts, times),
            Self::Sketch { sketch, .. } => sketch.halve(times),
            Self::Probability(_) => {}
        }
    }

    pub(super) fn clear(&mut self) {
        match self {
            Self::Count { counts, .. } => *counts = IdLines::default(),
            Self::Sketch { sketch, .. } => sketch.clear(),
            Self::Probability(_) => {}
        }
    }

    /// Returns how many ids without a row are counted one by one.
    pub(super) fn num_candidates(&self) -> usize {
        match self {
            Self::Count { counts, .. } => counts.len(),
            Self::Sketch { .. } | Self::Probability(_) => 0,
        }
    }

    pub(super) fn counts(&self) -> AdmissionCounts {
        match self {
            Self::Count { counts, .. } => {
                let (ids, counts) = counts.entries().unzip();
                AdmissionCounts { ids, counts }
            }
            Self::Sketch { sketch, .. } => {
                AdmissionCounts { ids: Vec::new(), counts: sketch.counters().to_vec() }
            }
            Self::Probability(_) => AdmissionCounts::default(),
        }
    }

    /// Adds what was counted, of those ids that `keeps` is true of.
    ///
    /// # Errors
    /// Says what does not fit this way of counting.
    pub(super) fn add(
        &mut self,
        saved: &AdmissionCounts,
        keeps: impl Fn(i64) -> bool,
    ) -> std::result::Result<(), String> {
        let (expected_ids, expected_counts) = match self {
            Self::Count { .. } => (saved.ids.len(), saved.ids.len()),
            Self::Sketch { sketch, .. } => (0, sketch.counters().len()),
            Self::Probability(_) => (0, 0),
        };
        if saved.ids.len() != expected_ids || saved.counts.len() != expected_counts {
            return Err(format!(
                "expected {expected_ids} ids and {expected_counts} counts of ids without a row, got {} and {}",
                saved.ids.len(),
                saved.counts.len()
            ));
        }
        match self {
            Self::Count { counts, .. } => add_counts(counts, saved, keeps),
            Self::Sketch { sketch, .. } => {
                sketch.add(&saved.counts);
                Ok(())
            }
            Self::Probability(_) => Ok(()),
        }
    }

    /// Returns the most bytes allocated when so many more ids are counted.
    pub(super) fn bytes_after(&self, more: usize) -> usize {
        match self {
            Self::Count { counts, .. } => counts.bytes_after(more),
            Self::Sketch { .. } | Self::Probability(_) => self.bytes(),
        }
    }

    /// Returns the bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Count { counts, .. } => counts.bytes(),
            Self::Sketch { sketch, .. } => size_of_val(sketch.counters()),
            Self::Probability(_) => 0,
        }
    }
}

/// Returns a map of the same ids with halved counts, without those of zero: it is as small as they need.
fn halved_counts(counts: &IdLines, times: u32) -> IdLines {
    let kept =
        || counts.entries().map(|(id, count)| (id, halved(count, times))).filter(|(_, count)| *count > 0);
    IdLines::of(kept().count(), kept())
}

fn add_counts(
    counts: &mut IdLines,
    saved: &AdmissionCounts,
    keeps: impl Fn(i64) -> bool,
) -> std::result::Result<(), String> {
    for (&id, &count) in saved.ids.iter().zip(&saved.counts).filter(|(id, _)| keeps(**id)) {
        if counts.find(id).is_some() {
            return Err(format!("the id {id} without a row is counted twice"));
        }
        counts.insert(id, RowIndex(count));
    }
    Ok(())
}

/// Returns a number from 0 up to but not 1, of 53 random bits.
fn unit(bits: u64) -> f64 {
    const STEPS: f64 = (1u64 << 53) as f64;
    (bits >> 11) as f64 / STEPS
}
