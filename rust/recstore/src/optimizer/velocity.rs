//! Stochastic gradient descent with momentum that carries rows on while steps leave them alone: they are caught up with
//! when they are next read or stepped.

use super::row_rule::{RowRule, power};
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

/// `v = momentum * v + lr * g`, then `w -= v`, and with Nesterov `w -= lr * g + momentum * v`.
///
/// Source: Sutskever et al. 2013, equations 1 and 2, the sign of `v` turned. `torch.optim.SGD` multiplies by the learning
/// rate last: both are the same as long as that stays, and a row that is left alone needs none here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Velocity {
    lr: f32,
    momentum: f32,
    is_nesterov: bool,
}

/// What a row keeps: the table's step at its last own one, as a multiple of [`COUNTED`] and what is left.
const SLOT: &str = "idle_step";

/// The floats of the slot.
const WIDTH: usize = 2;

/// Up to here every whole number is a float.
const COUNTED: u64 = 1 << 24;

pub(super) fn slots(dim: usize) -> Vec<Slot> {
    vec![Slot::signed("velocity", dim)]
}

/// What is kept besides.
pub(super) fn idle_slot() -> Slot {
    Slot::exact(SLOT, WIDTH)
}

impl Velocity {
    pub(super) fn new(lr: f64, momentum: f64, is_nesterov: bool) -> Self {
        Self { lr: lr as f32, momentum: momentum as f32, is_nesterov }
    }
}

impl RowRule for Velocity {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        for_each_element_briefly(self, weights, [state], gradient);
    }
}

impl ElementRule<1> for Velocity {
    #[inline(always)]
    fn step(&self, w: f32, [v]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let pushed = self.lr * (0.0 + g);
        let v = self.momentum * v + pushed;
        let moved = if self.is_nesterov { pushed + self.momentum * v } else { v };
        (w - moved, [v])
    }
}

/// The movement of rows without gradients up to a step of their table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coasting {
    momentum: f64,
    is_nesterov: bool,
    step: u64,
}

impl Coasting {
    pub(super) fn new(momentum: f64, is_nesterov: bool, step: u64) -> Self {
        Self { momentum, is_nesterov, step }
    }

    /// Returns what the steps since a row's last one, which its slot tells, leave of its velocity, and how many of its
    /// velocities they moved it by: `momentum + momentum^2 + ...`.
    #[inline(always)]
    pub(super) fn since(self, slot: &[f32]) -> (f32, f32) {
        let idle = self.step.saturating_sub(slot[0] as u64 * COUNTED + slot[1] as u64);
        if idle == 0 {
            return (1.0, 0.0);
        }
        let left = power(self.momentum, idle);
        let ahead = if self.is_nesterov { self.momentum } else { 1.0 };
        (left as f32, (ahead * self.momentum * (1.0 - left) / (1.0 - self.momentum)) as f32)
    }

    #[inline(always)]
    pub(super) fn note(self, slot: &mut [f32]) {
        slot.copy_from_slice(&[(self.step / COUNTED) as f32, (self.step % COUNTED) as f32]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_steps_are_caught_up_with_as_if_each_had_been_taken() {
        for is_nesterov in [false, true] {
            let (mut weight, mut velocity) = (1f64, 0.5f64);
            for idle in 1..400u64 {
                velocity *= 0.9;
                weight -= if is_nesterov { 0.9 * velocity } else { velocity };
                let (left, moved) = Coasting::new(0.9, is_nesterov, 7 + idle).since(&[0.0, 7.0]);
                assert!((f64::from(left) * 0.5 - velocity).abs() < 1e-7, "{idle}");
                assert!((1.0 - f64::from(moved) * 0.5 - weight).abs() < 1e-6, "{idle}");
            }
        }
    }

    #[test]
    fn the_step_of_a_row_is_exact_beyond_what_a_float_counts() {
        for step in [COUNTED - 1, COUNTED, COUNTED + 1, 3 * COUNTED + 5] {
            let mut slot = [0.0; WIDTH];
            Coasting::new(0.9, false, step).note(&mut slot);
            assert_eq!(Coasting::new(0.9, false, step).since(&slot), (1.0, 0.0));
            assert_eq!(Coasting::new(0.9, false, step + 1).since(&slot).0, 0.9);
        }
    }

    #[test]
    fn a_row_of_this_step_or_a_later_one_stays() {
        assert_eq!(Coasting::new(0.9, false, 7).since(&[0.0, 7.0]), (1.0, 0.0));
        assert_eq!(Coasting::new(0.9, true, 7).since(&[0.0, 9.0]), (1.0, 0.0));
    }
}
