//! Gradients that were merged before the step. Errors name the positions that ids had in the backward passes.

use super::gradient::{GradientPart, Gradients, MergedGradients, NotFinite};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::Simd;

impl GradientPart<'_> {
    fn original_len(&self) -> usize {
        self.merged_from.map_or(self.ids.len(), |from| from.count)
    }

    /// Returns the first gradient that is not finite, before any weight, but for those of padding.
    fn not_finite(&self, dim: usize) -> Option<NotFinite> {
        // Found when it was merged: the sum does not say which position it came from.
        if let Some(from) = self.merged_from {
            return from.not_finite;
        }
        let counted = self.ids.iter().enumerate().filter(|(_, id)| Some(**id) != self.padding_idx);
        let mut found = counted.filter_map(|(position, &id)| {
            let value = self.row(position, dim).iter().copied().find(|value| !value.is_finite())?;
            Some(NotFinite { id, position, value })
        });
        found.next()
    }

    fn original_position(&self, position: usize) -> usize {
        self.merged_from.map_or(position, |from| from.firsts[position] as usize)
    }

    /// Returns the bytes that the part keeps in use; of a matrix that it shares, those of its columns.
    pub(crate) fn bytes(&self, dim: usize) -> usize {
        let floats = self.gradients.len() / self.stride.max(1) * dim + self.weights.len();
        let words = self.row_of.len() + self.places.len();
        let firsts = self.merged_from.map_or(0, |from| from.firsts.len());
        size_of_val(self.ids) + (floats + words + firsts) * size_of::<f32>()
    }
}

impl Gradients<'_> {
    /// Returns where each part began among the positions of the backward passes.
    pub(crate) fn original_starts(&self) -> Vec<usize> {
        let mut next = 0;
        let start = |part: &GradientPart<'_>| {
            next += part.original_len();
            next - part.original_len()
        };
        self.parts.iter().map(start).collect()
    }

    /// Returns the first gradient that is not finite, in the order of the backward passes.
    pub(crate) fn not_finite(&self) -> Option<NotFinite> {
        let mut found = self.parts.iter().zip(self.original_starts()).filter_map(|(part, start)| {
            let found = part.not_finite(self.dim)?;
            Some(NotFinite { position: start + found.position, ..found })
        });
        found.next()
    }

    /// Returns the number of positions of the backward passes.
    pub(crate) fn original_len(&self) -> usize {
        self.parts.iter().map(GradientPart::original_len).sum()
    }

    /// Returns which position of the backward passes one is, the first of those merged.
    pub(crate) fn original_position(&self, position: usize) -> usize {
        self.original(&self.original_starts(), position)
    }

    fn original(&self, original_starts: &[usize], position: usize) -> usize {
        let part = self.starts[1..].partition_point(|&end| end <= position);
        original_starts[part] + self.parts[part].original_position(position - self.starts[part])
    }

    /// Returns distinct ids in ascending order, their sums, and the first position of each in the backward passes.
    pub(crate) fn merged_with_firsts(
        &self,
        executor: &dyn Executor,
        simd: Simd,
    ) -> (MergedGradients, Vec<u32>) {
        let starts = self.original_starts();
        let first = |position| u32::try_from(self.original(&starts, position)).unwrap_or(u32::MAX);
        self.sorted(executor, |sorted| {
            let positions = sorted.parts.iter().flat_map(|part| (0..part.len()).map(|key| part.first(key)));
            (self.merge_sorted(executor, simd, sorted), positions.map(first).collect())
        })
    }
}
