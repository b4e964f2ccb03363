//! Gradients that stay in torch's tensors until the optimizer's step.

use cxx::SharedPtr;
use recstore::{GradientPart, KeptGradients};

use crate::ffi::KeptTensors;

#[expect(unsafe_code, reason = "torch's tensors may be read and let go by any thread")]
mod threads {
    use crate::ffi::KeptTensors;

    // SAFETY: 1. a tensor's reference count is atomic, and torch frees tensors on any thread.
    unsafe impl Send for KeptTensors {}
    // SAFETY: 1. its methods read tensors that nobody replaces, and torch counts versions atomically.
    unsafe impl Sync for KeptTensors {}
}

/// The gradients of one lookup: of a table's ids within those of a batch.
pub(crate) struct TensorPart {
    pub(crate) tensors: SharedPtr<KeptTensors>,
    /// Where the ids begin and end.
    pub(crate) ids: std::ops::Range<usize>,
    /// Which of the tensor's gradients are theirs.
    pub(crate) floats: std::ops::Range<usize>,
    /// Where their places and the places' tag begin.
    pub(crate) first_place: usize,
    /// The elements of a row of the gradients.
    pub(crate) stride: usize,
    pub(crate) first_column: usize,
    /// The row for each id; empty for a row of its own each.
    pub(crate) row_of: Vec<u32>,
    pub(crate) padding_idx: Option<i64>,
}

impl KeptGradients for TensorPart {
    fn part(&self) -> GradientPart<'_> {
        let weights = self.tensors.weights();
        let places = self.first_place..self.first_place + self.ids.len() + recstore::PLACES_TAG;
        GradientPart {
            ids: &self.tensors.ids()[self.ids.clone()],
            gradients: &self.tensors.gradients()[self.floats.clone()],
            stride: self.stride,
            first_column: self.first_column,
            row_of: &self.row_of,
            weights: if weights.is_empty() { weights } else { &weights[self.ids.clone()] },
            padding_idx: self.padding_idx,
            places: self.tensors.places().get(places).unwrap_or_default(),
            merged_from: None,
        }
    }

    fn source(&self) -> *const () {
        self.tensors.as_ptr().cast()
    }

    fn were_changed(&self) -> bool {
        self.tensors.were_changed()
    }
}

/// Returns the gradients of each table's bags, all in one matrix, a table's columns behind those of the one before.
///
/// `offsets` holds one more than all bags, as for the lookup.
pub(crate) fn bag_parts(
    tensors: &SharedPtr<KeptTensors>,
    offsets: &[i64],
    dims: &[usize],
    padding_idx: Option<i64>,
) -> Vec<TensorPart> {
    let bags = (offsets.len() - 1) / dims.len();
    let stride = dims.iter().sum();
    let mut first_column = 0;
    let of_tables = dims.iter().enumerate().map(|(table, &dim)| {
        let offsets = &offsets[table * bags..=(table + 1) * bags];
        let ids = offsets[0] as usize..offsets[bags] as usize;
        let first_place = ids.start + table * recstore::PLACES_TAG;
        let tensors = tensors.clone();
        let part = TensorPart {
            floats: 0..tensors.gradients().len(),
            tensors,
            ids,
            first_place,
            stride,
            first_column,
            row_of: rows_of(offsets),
            padding_idx,
        };
        first_column += dim;
        part
    });
    of_tables.collect()
}

/// Returns the bag of each id; nothing where every bag has one.
fn rows_of(offsets: &[i64]) -> Vec<u32> {
    let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
    let is_at = |bag: usize, offset: i64| offset - first == bag as i64;
    // To the end, once there are as many ids as bags: a search that may stop at each takes twice as long, or more.
    let all_at = |is_each, (bag, &offset)| is_each & is_at(bag, offset);
    if is_at(offsets.len() - 1, last) && offsets.iter().enumerate().fold(true, all_at) {
        return Vec::new();
    }
    let end_of = |offset: i64| (offset - first) as usize;
    let mut rows = Vec::with_capacity(end_of(last));
    for (bag, &end) in offsets[1..].iter().enumerate() {
        rows.resize(end_of(end), bag as u32);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_know_their_bag_unless_each_has_its_own() {
        assert_eq!(rows_of(&[3, 5, 5, 6]), [0, 0, 2]);
        assert_eq!(rows_of(&[3, 3, 5, 6]), [1, 1, 2]);
        assert!(rows_of(&[3, 4, 5]).is_empty());
        assert!(rows_of(&[3]).is_empty());
    }
}
