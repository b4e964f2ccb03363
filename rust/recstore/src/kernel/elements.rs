//! Loops over the elements of rows.
//!
//! They go in pieces whose length the compiler knows. A loop of unknown length is unrolled to pieces of several vectors,
//! and rows are often shorter than those: they would be left to a loop that takes one element at a time.
//!
//! The longest pieces are too long to be unrolled. Of many short ones the compiler makes no loop over vectors but vectors
//! over pieces, gathered element by element: five times as slow.

/// What is done to an element of a row. `step` must be `#[inline(always)]`.
pub(crate) trait ElementRule<const SLOTS: usize> {
    /// Returns the new values of an element and of its slots.
    fn step(&self, value: f32, slots: [f32; SLOTS], input: f32) -> (f32, [f32; SLOTS]);
}

/// Adds rows, times a weight.
pub(crate) struct AddScaled(pub(crate) f32);

impl ElementRule<0> for AddScaled {
    #[inline(always)]
    fn step(&self, value: f32, _: [f32; 0], input: f32) -> (f32, [f32; 0]) {
        (value + self.0 * input, [])
    }
}

/// Adds rows.
#[inline(always)]
pub(crate) fn add_row(sum: &mut [f32], row: &[f32]) {
    for_each_element(&AddScaled(1.0), sum, [], row);
}

/// Calls a function of a const length with that of rows, if it is a usual one, or else another function: loops over
/// the lines of such rows need not be loops.
macro_rules! with_row_len {
    ($len:expr, $known:ident($($argument:expr),*), $any:expr) => {
        match $len {
            8 => $known::<8>($($argument),*),
            16 => $known::<16>($($argument),*),
            32 => $known::<32>($($argument),*),
            64 => $known::<64>($($argument),*),
            128 => $known::<128>($($argument),*),
            _ => $any,
        }
    };
}
pub(crate) use with_row_len;

/// Applies `rule` to each element of `values`, to those of `slots` and of `inputs` beside it.
///
/// # Panics
/// If `values` or a slot is shorter than `inputs`.
#[inline(always)]
pub(crate) fn for_each_element<const SLOTS: usize>(
    rule: &impl ElementRule<SLOTS>,
    values: &mut [f32],
    mut slots: [&mut [f32]; SLOTS],
    inputs: &[f32],
) {
    let start = in_pieces::<64, SLOTS>(rule, values, &mut slots, inputs, 0);
    let start = in_pieces::<16, SLOTS>(rule, values, &mut slots, inputs, start);
    let start = in_pieces::<8, SLOTS>(rule, values, &mut slots, inputs, start);
    in_pieces::<1, SLOTS>(rule, values, &mut slots, inputs, start);
}

/// Does the same in short pieces only. It is compiled to a quarter of the code: for rules that few choose, of which each
/// is compiled for each row type and kind of instructions.
///
/// # Panics
/// As [`for_each_element`].
#[inline(always)]
pub(crate) fn for_each_element_briefly<const SLOTS: usize>(
    rule: &impl ElementRule<SLOTS>,
    values: &mut [f32],
    mut slots: [&mut [f32]; SLOTS],
    inputs: &[f32],
) {
    let start = in_pieces::<16, SLOTS>(rule, values, &mut slots, inputs, 0);
    let start = in_pieces::<8, SLOTS>(rule, values, &mut slots, inputs, start);
    in_pieces::<1, SLOTS>(rule, values, &mut slots, inputs, start);
}

/// Takes pieces of `LEN` elements from `start` on, and returns where less than a piece is left.
#[inline(always)]
fn in_pieces<const LEN: usize, const SLOTS: usize>(
    rule: &impl ElementRule<SLOTS>,
    values: &mut [f32],
    slots: &mut [&mut [f32]; SLOTS],
    inputs: &[f32],
    mut start: usize,
) -> usize {
    while let Some(input) = inputs[start..].first_chunk::<LEN>() {
        let piece = start..start + LEN;
        // Copies: the compiler need not ask whether the slices overlap.
        let (mut value, mut state) = ([0.0; LEN], [[0.0; LEN]; SLOTS]);
        value.copy_from_slice(&values[piece.clone()]);
        for (own, slot) in state.iter_mut().zip(&*slots) {
            own.copy_from_slice(&slot[piece.clone()]);
        }
        for lane in 0..LEN {
            let mut own = [0.0; SLOTS];
            for (own, state) in own.iter_mut().zip(&state) {
                *own = state[lane];
            }
            (value[lane], own) = rule.step(value[lane], own, input[lane]);
            for (own, state) in own.iter().zip(&mut state) {
                state[lane] = *own;
            }
        }
        values[piece.clone()].copy_from_slice(&value);
        for (own, slot) in state.iter().zip(&mut *slots) {
            slot[piece.clone()].copy_from_slice(own);
        }
        start += LEN;
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rule;

    impl ElementRule<2> for Rule {
        fn step(&self, value: f32, [a, b]: [f32; 2], input: f32) -> (f32, [f32; 2]) {
            (value + 2.0 * input, [a - input, b * input])
        }
    }

    #[test]
    fn every_element_is_taken_once() {
        for dim in [0, 1, 7, 8, 9, 15, 16, 17, 24, 31, 63, 64, 65, 100, 256, 345] {
            let inputs: Vec<f32> = (0..dim).map(|column| column as f32).collect();
            let (mut values, mut a, mut b) = (vec![1.0; dim], vec![1.0; dim + 1], vec![1.0; dim]);
            for_each_element(&Rule, &mut values, [&mut a, &mut b], &inputs);
            assert!(values.iter().zip(&inputs).all(|(value, input)| *value == 1.0 + 2.0 * input));
            assert!(a.iter().zip(&inputs).all(|(value, input)| *value == 1.0 - input));
            assert_eq!(b, inputs);
            assert_eq!(a[dim], 1.0);
        }
    }
}
