//! Weight decay of the rows that a step leaves alone: they are caught up with when they are next read or stepped.

use serde::{Deserialize, Serialize};

use super::slot::Slot;

/// The share of a weight that the steps of a table have left since it was made, if no gradient came: the product of
/// `1 - lr * weight_decay` over its steps.
///
/// A row keeps what it was at its own last step, so the ratio of the two is what the steps since leave of the row, also
/// if the learning rate changed meanwhile. The product becomes smaller than any float: it is a fraction times a power of
/// two.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct DecayFactor {
    /// Above a half; at most one.
    fraction: f64,
    /// Zero or less.
    exponent: i64,
}

/// What a row keeps: the fraction and the exponent, each as a float.
const SLOT: &str = "idle_kept";

/// The floats of the slot.
const WIDTH: usize = 2;

pub(super) fn slot() -> Slot {
    Slot::exact(SLOT, WIDTH)
}

impl Default for DecayFactor {
    fn default() -> Self {
        Self { fraction: 1.0, exponent: 0 }
    }
}

impl DecayFactor {
    /// Returns the product after `steps` more steps of this learning rate.
    pub(crate) fn after_steps(self, lr: f64, weight_decay: f64, steps: u64) -> Self {
        self.after(1.0 - lr * weight_decay, steps)
    }

    /// Returns the product after so many more steps, each of which leaves `share` of a weight.
    fn after(self, share: f64, mut steps: u64) -> Self {
        /// Of a learning rate so high that nothing is left.
        const MIN: f64 = 1e-100;
        let mut square = Self::default().times(Self { fraction: share.clamp(MIN, 1.0), exponent: 0 });
        let mut kept = self;
        while steps > 0 {
            if steps & 1 == 1 {
                kept = kept.times(square);
            }
            square = square.times(square);
            steps >>= 1;
        }
        kept
    }

    fn times(self, other: Self) -> Self {
        let product = self.fraction * other.fraction;
        let shift = exponent_of(product);
        let exponent = self.exponent.saturating_add(other.exponent).saturating_add(shift);
        Self { fraction: product / power_of_two(shift), exponent }
    }

    /// Returns what is left of a row's weights whose slot is `row`.
    #[inline(always)]
    pub(super) fn since(self, row: &[f32]) -> f32 {
        const NOTHING: i64 = -1_000;
        // No step since: exactly one, though a slot keeps the fraction in single precision.
        if *row == self.as_slot() {
            return 1.0;
        }
        // Far below any float32, and within the range of `power_of_two`.
        let shift = self.exponent.saturating_sub(row[1] as i64).clamp(NOTHING, 0);
        (self.fraction / f64::from(row[0]) * power_of_two(shift)) as f32
    }

    /// Notes in a row's slot that its weights are as they are now.
    #[inline(always)]
    pub(super) fn note(self, slot: &mut [f32]) {
        slot.copy_from_slice(&self.as_slot());
    }

    #[inline(always)]
    fn as_slot(self) -> [f32; WIDTH] {
        [self.fraction as f32, self.exponent as f32]
    }

    /// Returns the fraction and the exponent.
    pub(crate) fn as_pair(self) -> [f64; 2] {
        [self.fraction, self.exponent as f64]
    }

    /// Returns the product of such a pair, unless it is none.
    pub(crate) fn of_pair([fraction, exponent]: [f64; 2]) -> Option<Self> {
        let is_product = fraction > 0.5 && fraction <= 1.0 && exponent <= 0.0 && exponent.fract() == 0.0;
        is_product.then_some(Self { fraction, exponent: exponent as i64 })
    }

    /// Whether it is one that steps can bring about.
    pub(crate) fn is_possible(self) -> bool {
        Self::of_pair(self.as_pair()) == Some(self)
    }
}

/// Returns the exponent of a normal number that is a fraction above a half, or one, times a power of two.
fn exponent_of(value: f64) -> i64 {
    const MANTISSA_BITS: u32 = 52;
    let is_power_of_two = value.to_bits() << (64 - MANTISSA_BITS) == 0;
    (value.to_bits() >> MANTISSA_BITS) as i64 - 1_022 - i64::from(is_power_of_two)
}

/// Returns two to a power from -1022 to 1023.
#[inline(always)]
fn power_of_two(exponent: i64) -> f64 {
    f64::from_bits(((exponent + 1_023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(kept: DecayFactor) -> f64 {
        kept.fraction * 2f64.powi(kept.exponent as i32)
    }

    #[test]
    fn the_product_is_that_of_all_steps() {
        let (mut kept, mut expected) = (DecayFactor::default(), 1f64);
        for step in 0..2_000u32 {
            let share = 1.0 - f64::from(step % 7) * 0.01;
            kept = kept.after(share, 1);
            expected *= share;
            assert!(kept.is_possible(), "{kept:?}");
            assert!((value(kept) / expected - 1.0).abs() < 1e-12, "{step}: {kept:?} {expected}");
        }
        assert!(kept.exponent < -60);
    }

    #[test]
    fn many_steps_at_once_are_as_many_one_by_one() {
        let one_by_one = (0..1_000).fold(DecayFactor::default(), |kept, _| kept.after(0.93, 1));
        let at_once = DecayFactor::default().after(0.93, 1_000);
        assert!((value(at_once) / value(one_by_one) - 1.0).abs() < 1e-12);
        assert_eq!(DecayFactor::default().after(1.0, u64::MAX), DecayFactor::default());
        assert!(DecayFactor::default().after(0.5, u64::MAX).is_possible());
        assert!(DecayFactor::default().after(-3.0, 5).is_possible());
    }

    #[test]
    fn a_row_keeps_what_the_steps_since_its_own_left() {
        let mut kept = DecayFactor::default().after(0.999, 123_456);
        let row = kept.as_slot();
        assert_eq!(kept.since(&row), 1.0);
        kept = kept.after(0.99, 1).after(0.9, 2);
        assert!((f64::from(kept.since(&row)) - 0.99 * 0.81).abs() < 1e-6);
        assert_eq!(kept.after(0.5, 100_000).since(&row), 0.0);
    }

    #[test]
    fn what_no_steps_bring_about_is_told() {
        for pair in [[0.4, 0.0], [1.5, 0.0], [0.75, 1.0], [0.75, -0.5], [f64::NAN, 0.0]] {
            assert_eq!(DecayFactor::of_pair(pair), None, "{pair:?}");
        }
        let kept = DecayFactor::default().after(0.3, 9);
        assert_eq!(DecayFactor::of_pair(kept.as_pair()), Some(kept));
    }
}
