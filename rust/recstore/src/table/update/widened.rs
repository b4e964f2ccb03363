//! What records do not keep in single precision: widened for some rows together before their steps, rounded behind them.
//!
//! Which conversions those are is looked up once for all of the rows, and the conversions of one kind follow each other.

use super::stepped_rows::{LocatedRow, SteppedRows};
use crate::kernel::cache::Cache;
use crate::kernel::hash::mix;
use crate::kernel::simd::{Kernel, Lanes};
use crate::rows::any_row_type::with_row_type;
use crate::rows::row_type::{Noise, RowType};

/// The widened values of some rows.
#[derive(Default)]
pub(super) struct Widened {
    /// For each row its weights and what its rule keeps, as far as one of both is not in single precision.
    values: Vec<f32>,
    /// How many values a row has.
    stride: usize,
    /// For each row what its rounding is drawn from.
    hashes: Vec<u64>,
}

impl Widened {
    /// Widens what `records` keep; meanwhile `upcoming` rows are asked for, one with each.
    #[inline(always)]
    pub(super) fn fill(
        &mut self,
        rows: &SteppedRows<'_>,
        records: &[&mut [f32]],
        upcoming: &[LocatedRow<'_>],
    ) {
        self.stride = rows.gradients.dim + rows.slots().iter().map(|slot| slot.width).sum::<usize>();
        self.values.resize(records.len() * self.stride, 0.0);
        rows.simd.run(WidenRecords { rows, records, upcoming, widened: self });
    }

    /// Returns the values of the row of a record.
    #[inline(always)]
    pub(super) fn of(&mut self, place: usize) -> &mut [f32] {
        &mut self.values[place * self.stride..][..self.stride]
    }

    /// Writes the values back to `records`, whose first gradients came at the positions `firsts`.
    #[inline(always)]
    pub(super) fn round(
        &mut self,
        rows: &SteppedRows<'_>,
        records: &mut [&mut [f32]],
        firsts: impl Iterator<Item = usize>,
    ) {
        self.hashes.clear();
        self.hashes.extend(firsts.map(|first| mix(rows.gradients.id(first)) ^ rows.noise));
        rows.simd.run(RoundRecords { rows, records, widened: self });
    }
}

/// See [`Widened::fill`]. A kernel of its own: steps are compiled for each rule, and so not for all conversions too.
struct WidenRecords<'a> {
    rows: &'a SteppedRows<'a>,
    records: &'a [&'a mut [f32]],
    upcoming: &'a [LocatedRow<'a>],
    widened: &'a mut Widened,
}

impl Kernel for WidenRecords<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { rows, records, upcoming, widened: Widened { values, stride, .. } } = self;
        let dim = rows.gradients.dim;
        // The type is looked up once for some dozens of rows: row by row, steps of 16-bit and 8-bit rows took
        // up to a quarter longer.
        with_row_type!(rows.row_type.dtype, row_type => {
            for (place, (record, values)) in records.iter().zip(values.chunks_exact_mut(*stride)).enumerate() {
                if let Some(row) = upcoming.get(place) {
                    rows.ask(row, Cache::First);
                }
                if !row_type.is_float32() {
                    row_type.widen(&record[..rows.weight_words], &mut values[..dim]);
                }
            }
        });
        let (mut word, mut value) = (rows.weight_words, dim);
        for slot in rows.slots() {
            slot.widen_each(
                records,
                word,
                values.chunks_exact_mut(*stride).map(|values| &mut values[value..]),
            );
            (word, value) = (word + slot.words(), value + slot.width);
        }
    }
}

/// See [`Widened::round`].
struct RoundRecords<'a, 'r> {
    rows: &'a SteppedRows<'a>,
    records: &'a mut [&'r mut [f32]],
    widened: &'a mut Widened,
}

impl Kernel for RoundRecords<'_, '_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { rows, records, widened: Widened { values, stride, hashes } } = self;
        let dim = rows.gradients.dim;
        with_row_type!(rows.row_type.dtype, row_type => {
            if !row_type.is_float32() {
                for ((record, values), hash) in records.iter_mut().zip(values.chunks_exact(*stride)).zip(&*hashes) {
                    let words = &mut record[..rows.weight_words];
                    row_type.round_stochastically(&values[..dim], words, Noise::new(*hash));
                }
            }
        });
        let (mut word, mut value) = (rows.weight_words, dim);
        for slot in rows.slots() {
            // Other bits than those of the row, and of the slots before.
            hashes.iter_mut().for_each(|hash| *hash = mix((*hash ^ 1) as i64));
            let values = values.chunks_exact(*stride).map(|values| &values[value..]);
            slot.round_each(records, word, values.zip(&*hashes));
            (word, value) = (word + slot.words(), value + slot.width);
        }
    }
}
