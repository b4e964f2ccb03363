//! Stochastic gradient descent.

use super::RowRule;

/// `g += weight_decay * w; w -= lr * g`.
///
/// Source: `torch.optim.SGD` without momentum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sgd {
    lr: f32,
    weight_decay: f32,
}

impl Sgd {
    pub(super) fn new(lr: f64, weight_decay: f64) -> Self {
        Self { lr: lr as f32, weight_decay: weight_decay as f32 }
    }
}

impl RowRule for Sgd {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], _state: &mut [f32], gradient: &[f32]) {
        for (w, g) in weights.iter_mut().zip(gradient) {
            *w -= self.lr * (0.0 + g + self.weight_decay * *w);
        }
    }
}
