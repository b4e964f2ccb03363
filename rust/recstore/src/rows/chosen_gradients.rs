//! The gradients at some positions, merged as all would be.

use super::gradient::{GradientPart, Gradients, MergedGradients};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::Simd;

/// The lists of a part at the positions chosen.
struct ChosenLists {
    ids: Vec<i64>,
    row_of: Vec<u32>,
    weights: Vec<f32>,
}

impl ChosenLists {
    fn of(part: &GradientPart<'_>, positions: impl Iterator<Item = usize> + Clone) -> Self {
        let row = |position: usize| part.row_of.get(position).copied().unwrap_or(position as u32);
        Self {
            ids: positions.clone().map(|position| part.ids[position]).collect(),
            row_of: positions.clone().map(row).collect(),
            weights: positions.filter_map(|position| part.weights.get(position).copied()).collect(),
        }
    }
}

impl Gradients<'_> {
    /// Returns the distinct ids at `positions`, which ascend, in ascending order and the sums of their gradients there.
    pub(crate) fn merged_at(
        &self,
        positions: &[usize],
        executor: &dyn Executor,
        simd: Simd,
    ) -> MergedGradients {
        let before = |end: usize| positions.partition_point(|&position| position < end);
        let starts: Vec<usize> = self.starts.iter().map(|&start| before(start)).collect();
        let lists = self.parts.iter().enumerate().map(|(number, part)| {
            let own = &positions[starts[number]..starts[number + 1]];
            ChosenLists::of(part, own.iter().map(|position| position - self.starts[number]))
        });
        let lists: Vec<ChosenLists> = lists.collect();
        let parts = self.parts.iter().zip(&lists).map(|(part, ChosenLists { ids, row_of, weights })| {
            let GradientPart { gradients, stride, first_column, .. } = *part;
            GradientPart { ids, gradients, stride, first_column, row_of, weights, ..GradientPart::default() }
        });
        let chunk_ends = self.chunk_ends.iter().map(|&end| before(end)).collect();
        let chosen = Gradients { dim: self.dim, parts: parts.collect(), starts, chunk_ends };
        chosen.merged(executor, simd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::Serial;
    use crate::rows::gradient::GradientChunk;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chosen_ids_have_the_sums_that_they_have_among_all(
            ids in prop::collection::vec(-9..9i64, 1..60), cuts in prop::collection::vec(0..60usize, 0..3), chosen in -9..9i64,
            values in prop::collection::vec(-1e3f32..1e3, 120), with_lists in any::<bool>()
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(ids.len())).collect();
            cuts.extend([0, ids.len()]);
            cuts.sort_unstable();
            let row_of: Vec<u32> = ids.iter().map(|id| id.unsigned_abs() as u32).collect();
            let chunk = |pair: &[usize]| {
                let range = pair[0]..pair[1];
                let (ids, lists) = (&ids[range.clone()], if with_lists { range.clone() } else { 0..0 });
                let values = if with_lists { &values[..] } else { &values[..2 * ids.len()] };
                let (row_of, weights) = (&row_of[lists.clone()], &values[lists]);
                GradientChunk { parts: vec![GradientPart { row_of, weights, ..GradientPart::new(ids, values, 2) }] }
            };
            let gradients = Gradients::new(2, &cuts.windows(2).map(chunk).collect::<Vec<_>>());
            let positions: Vec<usize> = (0..ids.len()).filter(|&position| ids[position] <= chosen).collect();
            let (all, simd) = (gradients.merged(&Serial, Simd::detect()), Simd::detect());
            let left_out: Vec<usize> = (0..all.ids.len()).filter(|&place| all.ids[place] > chosen).collect();
            prop_assert_eq!(gradients.merged_at(&positions, &Serial, simd), all.without(&left_out, 2));
        }
    }
}
