//! FTRL-proximal: AdaGrad's learning rates with an L1 term that makes weights exactly zero.

use super::{RowRule, Slot};

/// `n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / alpha * w`, then `w = 0` where `|z| <= l1`, else
/// `w = (sign(z) * l1 - z) / ((beta + sqrt(n')) / alpha + l2)`.
///
/// z always agrees with w: where solving for w from z gives another w than the row holds, because the row is new,
/// was overwritten, or alpha was changed, z is first set to `-w * ((beta + sqrt(n)) / alpha + l2) - sign(w) * l1`.
///
/// Source: McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ftrl {
    alpha: f32,
    beta: f32,
    l1: f32,
    l2: f32,
}

pub(super) fn slots(dim: usize) -> Vec<Slot> {
    vec![Slot { name: "n", width: dim }, Slot { name: "z", width: dim }]
}

impl Ftrl {
    pub(super) fn new(alpha: f64, beta: f64, l1: f64, l2: f64) -> Self {
        Self { alpha: alpha as f32, beta: beta as f32, l1: l1 as f32, l2: l2 as f32 }
    }

    /// Sets z from the weights of a row that was just created or overwritten.
    pub(super) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        let (n, z) = state.split_at_mut(weights.len());
        for ((w, n), z) in weights.iter().zip(n).zip(z) {
            *z = self.z_of(*w, n.sqrt());
        }
    }

    #[inline(always)]
    fn curvature(&self, root: f32) -> f32 {
        (self.beta + root) / self.alpha + self.l2
    }

    #[inline(always)]
    fn z_of(&self, w: f32, root: f32) -> f32 {
        let sign_l1 = if w == 0.0 { 0.0 } else { self.l1.copysign(w) };
        -w * self.curvature(root) - sign_l1
    }

    #[inline(always)]
    fn w_of(&self, z: f32, root: f32) -> f32 {
        let w = (self.l1.copysign(z) - z) / self.curvature(root);
        if z.abs() <= self.l1 { 0.0 } else { w }
    }
}

impl RowRule for Ftrl {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (n, z) = state.split_at_mut(gradient.len());
        for (((w, n), z), g) in weights.iter_mut().zip(n).zip(z).zip(gradient) {
            let old_root = n.sqrt();
            let old_z = if self.w_of(*z, old_root) == *w { *z } else { self.z_of(*w, old_root) };
            *n += g * g;
            let root = n.sqrt();
            *z = old_z + g - (root - old_root) / self.alpha * *w;
            *w = self.w_of(*z, root);
        }
    }
}
