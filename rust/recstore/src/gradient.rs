//! Sums the gradients of duplicate ids, so that an optimizer takes one step per distinct id.
//!
//! The counterparts of `torch.unique(sorted=True, return_inverse=True)` and of `index_add_` into zeros: distinct ids
//! come out in ascending order, and each sum starts at zero and takes its gradients in input order. Where nobody sees
//! the order of the ids, they stay in the order in which they first come, which spares sorting them.

use std::hash::BuildHasher;

use hashbrown::DefaultHashBuilder;

use crate::{Error, Result};

/// Gradients of one backward pass: `gradients` holds a row of `dim` elements for each of `ids`, duplicates allowed.
#[derive(Debug, Clone, Copy)]
pub struct GradientChunk<'a> {
    /// The ids, in input order.
    pub ids: &'a [i64],
    /// Their gradients, row-major.
    pub gradients: &'a [f32],
}

/// Distinct ids and the sum of the gradients of each, row-major.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MergedGradients {
    /// The distinct ids.
    pub ids: Vec<i64>,
    /// A row of `dim` elements for each of `ids`.
    pub sums: Vec<f32>,
}

/// Returns the distinct ids in ascending order, and for every input its place among them.
pub fn unique(ids: &[i64]) -> (Vec<i64>, Vec<usize>) {
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_unstable_by_key(|&position| ids[position]);
    let mut distinct = Vec::new();
    let mut inverse = vec![0; ids.len()];
    for position in order {
        if distinct.last() != Some(&ids[position]) {
            distinct.push(ids[position]);
        }
        inverse[position] = distinct.len() - 1;
    }
    (distinct, inverse)
}

/// Merges each chunk on its own, then the merged chunks in their order; rows have `dim` elements, and ids ascend.
///
/// A chunk that comes merged already therefore gives the same bits as the chunk it was merged from.
///
/// # Errors
/// [`Error::LengthMismatch`] if a chunk does not hold `dim` values an id.
pub fn merge_gradients(dim: usize, chunks: &[GradientChunk<'_>]) -> Result<MergedGradients> {
    for chunk in chunks {
        let (expected, actual) = (chunk.ids.len() * dim, chunk.gradients.len());
        if expected != actual || dim == 0 {
            let what = format!("gradient values for {} ids of dim {dim}", chunk.ids.len());
            return Err(Error::LengthMismatch { operation: "merge_gradients", what, expected, actual });
        }
    }
    Ok(merge_checked(dim, chunks))
}

/// Merges chunks that hold `dim` values an id, as [`merge_gradients`].
pub(crate) fn merge_checked(dim: usize, chunks: &[GradientChunk<'_>]) -> MergedGradients {
    merge_in_input_order(dim, chunks).sorted(dim)
}

/// Merges chunks that hold `dim` values an id, as [`merge_gradients`], ids in the order in which they first come.
pub(crate) fn merge_in_input_order(dim: usize, chunks: &[GradientChunk<'_>]) -> MergedGradients {
    if let [chunk] = chunks {
        return merge_chunk(dim, *chunk);
    }
    let mut joined = MergedGradients::default();
    for &chunk in chunks {
        let merged = merge_chunk(dim, chunk);
        joined.ids.extend(merged.ids);
        joined.sums.extend(merged.sums);
    }
    merge_chunk(dim, GradientChunk { ids: &joined.ids, gradients: &joined.sums })
}

fn merge_chunk(dim: usize, chunk: GradientChunk<'_>) -> MergedGradients {
    let mut places = Places::for_ids(chunk.ids.len());
    let mut merged = MergedGradients { ids: Vec::new(), sums: Vec::with_capacity(chunk.gradients.len()) };
    for (&id, gradient) in chunk.ids.iter().zip(chunk.gradients.chunks_exact(dim)) {
        let place = places.find_or_push(id, &mut merged.ids);
        if place * dim == merged.sums.len() {
            merged.sums.resize((place + 1) * dim, 0.0);
        }
        for (sum, g) in merged.sums[place * dim..(place + 1) * dim].iter_mut().zip(gradient) {
            *sum += g;
        }
    }
    merged
}

/// The places of distinct ids in a list: open addressing with linear probing, at most half full.
///
/// Smaller than a map with the ids as keys, and so mostly in the processor's cache: the ids are in the list already.
struct Places {
    places: Vec<u32>,
    hasher: DefaultHashBuilder,
}

impl Places {
    const FREE: u32 = u32::MAX;

    fn for_ids(count: usize) -> Self {
        let places = vec![Self::FREE; (2 * count).next_power_of_two()];
        Self { places, hasher: DefaultHashBuilder::default() }
    }

    /// Returns the place of `id` in `distinct`, to which it is added if it is not there.
    #[inline]
    fn find_or_push(&mut self, id: i64, distinct: &mut Vec<i64>) -> usize {
        let mask = self.places.len() - 1;
        let mut slot = self.hasher.hash_one(id) as usize & mask;
        loop {
            let place = self.places[slot];
            if place == Self::FREE {
                self.places[slot] = distinct.len() as u32;
                distinct.push(id);
                return distinct.len() - 1;
            }
            if distinct[place as usize] == id {
                return place as usize;
            }
            slot = (slot + 1) & mask;
        }
    }
}

impl MergedGradients {
    /// Returns the same sums with ids in ascending order.
    fn sorted(self, dim: usize) -> Self {
        if self.ids.is_sorted() {
            return self;
        }
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_unstable_by_key(|&place| self.ids[place]);
        let ids = order.iter().map(|&place| self.ids[place]).collect();
        let sums =
            order.iter().flat_map(|&place| &self.sums[place * dim..(place + 1) * dim]).copied().collect();
        Self { ids, sums }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, HashSet};

    #[test]
    fn chunks_are_summed_one_by_one() {
        // (1e8 + 1) + (-1e8 + 1) in single precision is 0 by chunk, 1 in one run.
        let chunk = |gradients| GradientChunk { ids: &[5, 5], gradients };
        let merged = merge_gradients(1, &[chunk(&[1e8, 1.0]), chunk(&[-1e8, 1.0])]).unwrap();
        assert_eq!(merged.sums, [0.0]);
    }

    #[test]
    fn a_chunk_of_the_wrong_length_is_refused() {
        let chunk = GradientChunk { ids: &[5, 6], gradients: &[1.0; 3] };
        let message = merge_gradients(2, &[chunk]).unwrap_err().to_string();
        assert!(message.contains("expected 4 gradient values for 2 ids of dim 2, got 3"), "{message}");
        assert!(merge_gradients(0, &[GradientChunk { ids: &[5], gradients: &[] }]).is_err());
    }

    proptest! {
        #[test]
        fn merging_agrees_with_a_map(ids in prop::collection::vec(prop_oneof![-3..3i64, Just(i64::MIN), Just(i64::MAX)], 0..40)) {
            let gradients: Vec<f32> = (0..ids.len() * 2).map(|j| j as f32 * 0.1).collect();
            let mut model = BTreeMap::<i64, [f32; 2]>::new();
            for (id, g) in ids.iter().zip(gradients.chunks_exact(2)) {
                let sum = model.entry(*id).or_default();
                sum[0] += g[0];
                sum[1] += g[1];
            }
            let merged = merge_gradients(2, &[GradientChunk { ids: &ids, gradients: &gradients }]).unwrap();
            prop_assert_eq!(&merged.ids, &model.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(&merged.sums, &model.values().flatten().copied().collect::<Vec<_>>());
            let unsorted = merge_in_input_order(2, &[GradientChunk { ids: &ids, gradients: &gradients }]);
            let mut seen = HashSet::new();
            prop_assert_eq!(&unsorted.ids, &ids.iter().copied().filter(|&id| seen.insert(id)).collect::<Vec<_>>());
            prop_assert_eq!(unsorted.sorted(2), merged);
            let (distinct, inverse) = unique(&ids);
            prop_assert_eq!(inverse.iter().map(|&row| distinct[row]).collect::<Vec<_>>(), ids);
        }
    }
}
