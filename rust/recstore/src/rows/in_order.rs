//! Gradients as they are, in one matrix: for a table whose step sums them.

use std::borrow::Cow;

use crate::rows::gradient::{DistinctGradients, Gradients};

impl<'a> Gradients<'a> {
    /// Returns a gradient for each position that counts, in their order, if they are of one pass and have no weights: what
    /// a table sums to the same bits as these.
    pub(crate) fn in_order(&self) -> Option<DistinctGradients<'a>> {
        if !self.is_plain() {
            return None;
        }
        if let [part] = &self.parts[..]
            && part.is_one_row_an_id(self.dim)
        {
            let (ids, sums) = (Cow::Borrowed(part.ids), Cow::Borrowed(part.gradients));
            return Some(DistinctGradients { ids, sums });
        }
        let (mut ids, mut rows) = (Vec::with_capacity(self.len()), Vec::with_capacity(self.len() * self.dim));
        for part in &self.parts {
            let counting = part.ids.iter().enumerate().filter(|&(_, id)| part.padding_idx != Some(*id));
            for (position, &id) in counting {
                ids.push(id);
                rows.extend_from_slice(part.row(position, self.dim));
            }
        }
        Some(DistinctGradients { ids: Cow::Owned(ids), sums: Cow::Owned(rows) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::Serial;
    use crate::rows::gradient::{GradientChunk, GradientPart, MergedGradients, merge_gradients};
    use proptest::prelude::*;

    const DIM: usize = 3;

    fn merged(chunk: GradientChunk<'_>) -> MergedGradients {
        merge_gradients(&Serial, DIM, &[chunk]).unwrap()
    }

    proptest! {
        #[test]
        fn they_sum_to_the_bits_of_the_parts_that_they_were(
            ids in prop::collection::vec(-3..3i64, 0..30),
            split in 0..30usize,
            rows in prop::collection::vec(0..9u32, 30),
            padding_idx in prop::option::of(-3..3i64),
            is_whole in any::<bool>(),
        ) {
            let matrix: Vec<f32> = (0..9 * 5).map(|place| 3.0 - place as f32 * 0.37).collect();
            let whole = vec![0.3; ids.len() * DIM];
            let (front, behind) = ids.split_at(split.min(ids.len()));
            let parts = match is_whole {
                true => vec![GradientPart::new(&ids, &whole, DIM)],
                false => [front, behind].map(|ids| GradientPart {
                    stride: 5,
                    first_column: 1,
                    row_of: &rows[..ids.len()],
                    padding_idx,
                    ..GradientPart::new(ids, &matrix, DIM)
                }).to_vec(),
            };
            let chunk = GradientChunk { parts };
            let found = Gradients::new(DIM, std::slice::from_ref(&chunk)).in_order().unwrap();
            prop_assert_eq!(matches!(found.sums, Cow::Borrowed(_)), is_whole);
            prop_assert_eq!(merged(GradientChunk::new(&found.ids, &found.sums, DIM)), merged(chunk));
        }
    }

    #[test]
    fn those_of_several_passes_or_with_weights_are_not_left_as_they_are() {
        let chunk = GradientChunk::new(&[5], &[1.0; DIM], DIM);
        assert!(Gradients::new(DIM, &[chunk.clone(), chunk.clone()]).in_order().is_none());
        let weighed = GradientPart { weights: &[0.5], ..chunk.parts[0] };
        assert!(Gradients::new(DIM, &[GradientChunk { parts: vec![weighed] }]).in_order().is_none());
    }
}
