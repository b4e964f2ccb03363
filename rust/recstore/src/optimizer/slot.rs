//! What is kept beside each row, and in what type.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::rows::coded_row::{Coded, E4m3};
use crate::rows::coded_squares::CodedSquares;
use crate::rows::row_type::{Bfloat16, Float32, Noise, RowType};

/// The type of what a table's rule keeps for each element of a row. Arithmetic is in single precision always; a step
/// rounds stochastically. What is kept once a row, and averages of rows, stay in single precision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateDtype {
    /// IEEE 754 single precision.
    #[default]
    Float32,
    /// The upper half of a float32: its range, 8 bits of precision.
    Bfloat16,
    /// Floats of 8 bits times a power of two, one a row: e4m3 for what has a sign, five bits of exponent and three of
    /// mantissa for sums and averages of squares.
    Float8,
}

impl StateDtype {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
    pub(crate) fn is_float32(&self) -> bool {
        *self == Self::Float32
    }
}

/// A named part of the state beside each row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The name of the field.
    pub(crate) name: Cow<'static, str>,
    /// The number of elements a row.
    pub(crate) width: usize,
    content: Content,
    /// How the elements lie in a record.
    pub(crate) slot_type: SlotType,
}

/// What the elements of a slot are: it says how those of a narrow type are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Counts, and whatever else is kept as it is.
    Exact,
    /// One for each element of the row, of either sign.
    Signed,
    /// Sums or averages of squares, one for each element of the row. Steps divide by their roots.
    Squares,
}

/// The type in which the elements of a slot are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotType {
    Float32,
    Bfloat16,
    /// [`Coded`] floats of 8 bits, e4m3.
    Float8,
    /// [`CodedSquares`].
    Squares8,
}

/// Evaluates an expression with the row type by which a slot's elements are kept.
macro_rules! with_slot_type {
    ($slot_type:expr, $row_type:ident => $body:expr) => {
        match $slot_type {
            SlotType::Float32 => {
                let $row_type = Float32;
                $body
            }
            SlotType::Bfloat16 => {
                let $row_type = Bfloat16;
                $body
            }
            SlotType::Float8 => {
                let $row_type = Coded(E4m3);
                $body
            }
            SlotType::Squares8 => {
                let $row_type = CodedSquares;
                $body
            }
        }
    };
}

impl Slot {
    /// Returns a slot whose elements are always kept in single precision.
    pub(crate) fn exact(name: impl Into<Cow<'static, str>>, width: usize) -> Self {
        Self::new(name, width, Content::Exact)
    }

    /// Returns a slot with an element of either sign for each of the row's.
    pub(super) fn signed(name: &'static str, dim: usize) -> Self {
        Self::new(name, dim, Content::Signed)
    }

    /// Returns a slot with a sum or an average of squares for each element of the row.
    pub(super) fn squares(name: &'static str, dim: usize) -> Self {
        Self::new(name, dim, Content::Squares)
    }

    fn new(name: impl Into<Cow<'static, str>>, width: usize, content: Content) -> Self {
        Self { name: name.into(), width, content, slot_type: SlotType::Float32 }
    }

    /// Whether it has an element for each of the row's, which a narrow type makes smaller.
    pub(super) fn is_of_elements(&self) -> bool {
        self.content != Content::Exact
    }

    /// Returns the slot as a table keeps it whose state has this type.
    pub(crate) fn kept_as(self, dtype: StateDtype) -> Self {
        let slot_type = match (self.content, dtype) {
            (Content::Exact, _) | (_, StateDtype::Float32) => SlotType::Float32,
            (_, StateDtype::Bfloat16) => SlotType::Bfloat16,
            (Content::Signed, StateDtype::Float8) => SlotType::Float8,
            (Content::Squares, StateDtype::Float8) => SlotType::Squares8,
        };
        Self { slot_type, ..self }
    }

    /// Returns the four-byte words that it takes in a record.
    pub(crate) fn words(&self) -> usize {
        with_slot_type!(self.slot_type, row_type => row_type.words(self.width))
    }

    /// Writes the elements in `words` to `values`.
    #[inline(always)]
    pub(crate) fn widen(&self, words: &[f32], values: &mut [f32]) {
        with_slot_type!(self.slot_type, row_type => row_type.widen(words, values));
    }

    /// Writes `values` to `words`, rounded to the nearest.
    pub(crate) fn round(&self, values: &[f32], words: &mut [f32]) {
        with_slot_type!(self.slot_type, row_type => row_type.round(values, words));
    }

    /// Writes the elements that lie at word `word` of each record to its values.
    #[inline(always)]
    pub(crate) fn widen_each<'a>(
        &self,
        records: &[&mut [f32]],
        word: usize,
        values: impl Iterator<Item = &'a mut [f32]>,
    ) {
        // Whole loops over the elements: in pieces of 16, 8 and 1 a step of Adam in bfloat16 took 4.3 against
        // 3.7 ms.
        with_slot_type!(self.slot_type, row_type => {
            let words = row_type.words(self.width);
            for (record, values) in records.iter().zip(values) {
                row_type.widen(&record[word..][..words], &mut values[..self.width]);
            }
        });
    }

    /// Writes values to word `word` of their records, each rounded up or down as its hash says, which mixes the table's
    /// seed, the id and the step.
    #[inline(always)]
    pub(crate) fn round_each<'a>(
        &self,
        records: &mut [&mut [f32]],
        word: usize,
        values: impl Iterator<Item = (&'a [f32], &'a u64)>,
    ) {
        with_slot_type!(self.slot_type, row_type => {
            let words = row_type.words(self.width);
            for (record, (values, hash)) in records.iter_mut().zip(values) {
                let words = &mut record[word..][..words];
                row_type.round_stochastically(&values[..self.width], words, Noise::new(*hash));
            }
        });
    }
}

/// Several slots, one behind another, as words and as elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots<'a>(pub(crate) &'a [Slot]);

impl Slots<'_> {
    /// Returns how many elements they have together.
    pub(crate) fn width(self) -> usize {
        self.0.iter().map(|slot| slot.width).sum()
    }

    /// Returns how many four-byte words they take together.
    pub(crate) fn words(self) -> usize {
        self.0.iter().map(Slot::words).sum()
    }

    /// Writes the elements in `words` to `values`.
    #[inline(always)]
    pub(crate) fn widen(self, mut words: &[f32], mut values: &mut [f32]) {
        for slot in self.0 {
            let (own_words, own_values);
            (own_words, words) = words.split_at(slot.words());
            (own_values, values) = values.split_at_mut(slot.width);
            slot.widen(own_words, own_values);
        }
    }

    /// Writes `values` to `words`, rounded to the nearest.
    pub(crate) fn round(self, mut values: &[f32], mut words: &mut [f32]) {
        for slot in self.0 {
            let (own_values, own_words);
            (own_values, values) = values.split_at(slot.width);
            (own_words, words) = words.split_at_mut(slot.words());
            slot.round(own_values, own_words);
        }
    }
}
