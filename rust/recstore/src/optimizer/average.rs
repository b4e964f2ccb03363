//! The moving average of each row, beside whatever its rule keeps.

use super::row_rule::power;
use super::slot::Slot;

/// `e = ema_decay * e + (1 - ema_decay) * w` at every step of the table, whether or not it steps the row: the steps since
/// the row's last one, in which `w` was the same, are caught up with first, as `e = w + ema_decay^n * (e - w)`. A row that
/// is new or was overwritten is its own average.
///
/// Source: Polyak and Juditsky 1992, weighted exponentially; `torch.optim.swa_utils.get_ema_multi_avg_fn`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Average {
    decay: f64,
    step: u64,
}

pub(crate) fn slots(dim: usize) -> [Slot; 2] {
    [Slot::exact("ema", dim), Slot::exact("ema_step", 1)]
}

impl Average {
    pub(crate) fn new(decay: f64, step: u64) -> Self {
        Self { decay, step }
    }

    /// Makes a row its own average.
    pub(super) fn start(self, weights: &[f32], averaged: &mut [f32]) {
        let (average, last) = averaged.split_at_mut(weights.len());
        average.copy_from_slice(weights);
        last[0] = self.step as f32;
    }

    /// Catches up with the steps since the row's last one, in which its weights were these.
    #[inline(always)]
    pub(crate) fn catch_up(self, weights: &[f32], averaged: &mut [f32]) {
        let (average, last) = averaged.split_at_mut(weights.len());
        let idle = (self.step - 1).saturating_sub(last[0] as u64);
        if idle > 0 {
            approach(average, weights, power(self.decay, idle) as f32);
        }
    }

    /// Takes this step, which brought the weights.
    #[inline(always)]
    pub(crate) fn follow(self, weights: &[f32], averaged: &mut [f32]) {
        let (average, last) = averaged.split_at_mut(weights.len());
        approach(average, weights, self.decay as f32);
        last[0] = self.step as f32;
    }
}

/// Leaves `share` of the way from the weights to their average.
#[inline(always)]
fn approach(average: &mut [f32], weights: &[f32], share: f32) {
    for (average, weight) in average.iter_mut().zip(weights) {
        *average = weight + share * (*average - weight);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_steps_are_caught_up_with_as_if_each_had_been_taken() {
        let mut averaged = [0.0; 3];
        Average::new(0.9, 4).start(&[1.0, -2.0], &mut averaged);
        assert_eq!(averaged, [1.0, -2.0, 4.0]);
        let (mut weights, mut expected) = ([1.0f32, -2.0], [1.0f64, -2.0]);
        for step in 5..40u64 {
            if matches!(step, 5 | 6 | 17 | 39) {
                let average = Average::new(0.9, step);
                average.catch_up(&weights, &mut averaged);
                weights = weights.map(|weight| weight + 0.5);
                average.follow(&weights, &mut averaged);
            }
            for (expected, weight) in expected.iter_mut().zip(weights) {
                *expected = 0.9 * *expected + 0.1 * f64::from(weight);
            }
        }
        assert_eq!(averaged[2], 39.0);
        for (average, expected) in averaged.iter().zip(expected) {
            assert!((f64::from(*average) - expected).abs() < 1e-6, "{averaged:?} {expected:?}");
        }
    }

    #[test]
    fn a_step_before_the_last_one_is_no_idle_step() {
        let mut averaged = [3.0, 9.0];
        Average::new(0.5, 2).catch_up(&[1.0], &mut averaged);
        assert_eq!(averaged, [3.0, 9.0]);
    }
}
