//! The optimizers and their hyper-parameters.

use serde::{Deserialize, Serialize};

use super::ranges::{not_negative, positive, require, share};
use crate::Result;

/// A rule and its hyper-parameters, named as in `torch.optim`. The equations stand in the rules' own documents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
        /// The share of the movement before that goes on.
        #[serde(default, skip_serializing_if = "is_zero")]
        momentum: f64,
        /// Whether the gradient is taken ahead of the movement: Nesterov.
        #[serde(default, skip_serializing_if = "is_false")]
        nesterov: bool,
        /// Whether rows that a step leaves alone decay, or move on, too: they are caught up with when they are next read
        /// or stepped.
        #[serde(default, skip_serializing_if = "is_false")]
        catch_up: bool,
    },
    /// AdaGrad.
    Adagrad {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// Keeps the divisor from zero.
        #[serde(default = "default_adagrad_eps")]
        eps: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
        /// How the learning rate falls with the table's steps: by `1 + (t - 1) * lr_decay`.
        #[serde(default, skip_serializing_if = "is_zero")]
        lr_decay: f64,
        /// Where `eps` stands.
        #[serde(default)]
        convention: Convention,
    },
    /// AdaGrad with one accumulator a row.
    RowwiseAdagrad {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// Keeps the divisor from zero.
        #[serde(default = "default_adagrad_eps")]
        eps: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
        /// How the learning rate falls with the table's steps: by `1 + (t - 1) * lr_decay`.
        #[serde(default, skip_serializing_if = "is_zero")]
        lr_decay: f64,
        /// Where `eps` stands, and whether squares are summed or averaged over the row.
        #[serde(default)]
        convention: Convention,
    },
    /// `RMSprop` on the rows that have a gradient.
    Rmsprop {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the averages.
        #[serde(default = "default_rmsprop_alpha")]
        alpha: f64,
        /// Keeps the divisor from zero.
        #[serde(default = "default_adam_eps")]
        eps: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
        /// The share of the movement before that goes on.
        #[serde(default)]
        momentum: f64,
        /// Whether the average gradient is taken off the average square.
        #[serde(default)]
        centered: bool,
    },
    /// Adadelta on the rows that have a gradient.
    Adadelta {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the averages.
        #[serde(default = "default_adadelta_rho")]
        rho: f64,
        /// Keeps the divisor from zero, and lets the first steps begin.
        #[serde(default = "default_adadelta_eps")]
        eps: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
    },
    /// Adam on the rows that have a gradient.
    Adam {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the two moments.
        #[serde(default = "default_betas")]
        betas: [f64; 2],
        /// Keeps the divisor from zero.
        #[serde(default = "default_adam_eps")]
        eps: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
        /// Whose steps correct the bias of the moments.
        #[serde(default)]
        bias_correction: BiasCorrection,
        /// Whether the greatest second moment so far counts: AMSGrad.
        #[serde(default, skip_serializing_if = "is_false")]
        amsgrad: bool,
    },
    /// AdamW on the rows that have a gradient.
    Adamw {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the two moments.
        #[serde(default = "default_betas")]
        betas: [f64; 2],
        /// Keeps the divisor from zero.
        #[serde(default = "default_adam_eps")]
        eps: f64,
        /// The share of `lr * w` that a step takes away.
        #[serde(default = "default_adamw_weight_decay")]
        weight_decay: f64,
        /// Whose steps correct the bias of the moments.
        #[serde(default)]
        bias_correction: BiasCorrection,
        /// Whether the greatest second moment so far counts: AMSGrad.
        #[serde(default, skip_serializing_if = "is_false")]
        amsgrad: bool,
        /// Whether rows that a step leaves alone decay too: they are caught up with when they are next read or stepped.
        #[serde(default, skip_serializing_if = "is_false")]
        catch_up: bool,
    },
    /// Adam with one second moment a row.
    RowwiseAdam {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the two moments.
        #[serde(default = "default_betas")]
        betas: [f64; 2],
        /// Keeps the divisor from zero.
        #[serde(default = "default_adam_eps")]
        eps: f64,
        /// The factor of `w` that is added to the gradient.
        #[serde(default)]
        weight_decay: f64,
        /// Whose steps correct the bias of the moments.
        #[serde(default)]
        bias_correction: BiasCorrection,
    },
    /// LAMB on the rows that have a gradient, each a layer of its own.
    Lamb {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the two moments.
        #[serde(default = "default_betas")]
        betas: [f64; 2],
        /// Keeps the divisor from zero.
        #[serde(default = "default_lamb_eps")]
        eps: f64,
        /// The factor of `w` that is added to the direction.
        #[serde(default)]
        weight_decay: f64,
        /// Whose steps correct the bias of the moments.
        #[serde(default)]
        bias_correction: BiasCorrection,
    },
    /// Lion on the rows that have a gradient.
    Lion {
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
        /// The decay of the moment, as the direction is taken and as it is kept.
        #[serde(default = "default_lion_betas")]
        betas: [f64; 2],
        /// The share of `lr * w` that a step takes away.
        #[serde(default)]
        weight_decay: f64,
        /// Whether rows that a step leaves alone decay too: they are caught up with when they are next read or stepped.
        #[serde(default, skip_serializing_if = "is_false")]
        catch_up: bool,
    },
    /// FTRL-proximal.
    Ftrl {
        /// The learning rate.
        #[serde(default = "default_lr", alias = "lr")]
        alpha: f64,
        /// Damps the first steps.
        #[serde(default = "default_ftrl_beta")]
        beta: f64,
        /// The strength of the L1 term, which makes weights exactly zero.
        #[serde(default)]
        l1: f64,
        /// The strength of the L2 term.
        #[serde(default)]
        l2: f64,
    },
    /// A rule of the program's own, which the store that keeps the rows must know: see [`crate::UpdateRule`].
    Rule {
        /// The name it is registered under.
        name: String,
        /// The learning rate.
        #[serde(default = "default_lr")]
        lr: f64,
    },
}

/// Which of two common definitions AdaGrad and row-wise AdaGrad follow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Convention {
    /// `sqrt(s + eps)`, and row-wise the sum of squares: `RecStore`.
    #[default]
    Recstore,
    /// `sqrt(s) + eps`, and row-wise the mean of squares: `torch.optim.Adagrad` and FBGEMM.
    Torch,
}

/// Whose count of steps corrects the bias of Adam's moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasCorrection {
    /// The table's, as `torch.optim.SparseAdam`.
    #[default]
    Table,
    /// The row's own, kept beside it: a row first seen late starts as corrected as the first ones did.
    Row,
}

fn default_lr() -> f64 {
    0.01
}
fn default_adagrad_eps() -> f64 {
    1e-10
}
fn default_adam_eps() -> f64 {
    1e-8
}
fn default_adamw_weight_decay() -> f64 {
    0.01
}
fn default_betas() -> [f64; 2] {
    [0.9, 0.999]
}
fn default_ftrl_beta() -> f64 {
    1.0
}
fn default_rmsprop_alpha() -> f64 {
    0.99
}
fn default_adadelta_rho() -> f64 {
    0.9
}
fn default_adadelta_eps() -> f64 {
    1e-6
}
fn default_lamb_eps() -> f64 {
    1e-6
}
fn default_lion_betas() -> [f64; 2] {
    [0.9, 0.99]
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_false(value: &bool) -> bool {
    !value
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::Sgd { lr: default_lr(), weight_decay: 0.0, momentum: 0.0, nesterov: false, catch_up: false }
    }
}

impl OptimizerConfig {
    /// Returns the learning rate (FTRL: `alpha`).
    pub fn learning_rate(&self) -> f64 {
        match *self {
            Self::Sgd { lr, .. }
            | Self::Adagrad { lr, .. }
            | Self::RowwiseAdagrad { lr, .. }
            | Self::Rmsprop { lr, .. }
            | Self::Adadelta { lr, .. }
            | Self::Adam { lr, .. }
            | Self::Adamw { lr, .. }
            | Self::RowwiseAdam { lr, .. }
            | Self::Lamb { lr, .. }
            | Self::Lion { lr, .. }
            | Self::Rule { lr, .. }
            | Self::Ftrl { alpha: lr, .. } => lr,
        }
    }

    /// Whether a learning rate of zero is out of the rule's range: FTRL divides by it.
    pub(crate) fn needs_positive_learning_rate(&self) -> bool {
        matches!(self, Self::Ftrl { .. })
    }

    /// The learning rate and the weight decay, which may differ between two openings of one table.
    pub(super) fn tunables_mut(&mut self) -> (&mut f64, Option<&mut f64>) {
        match self {
            Self::Sgd { lr, weight_decay, .. }
            | Self::Adagrad { lr, weight_decay, .. }
            | Self::RowwiseAdagrad { lr, weight_decay, .. }
            | Self::Rmsprop { lr, weight_decay, .. }
            | Self::Adadelta { lr, weight_decay, .. }
            | Self::Adam { lr, weight_decay, .. }
            | Self::Adamw { lr, weight_decay, .. }
            | Self::RowwiseAdam { lr, weight_decay, .. }
            | Self::Lamb { lr, weight_decay, .. }
            | Self::Lion { lr, weight_decay, .. } => (lr, Some(weight_decay)),
            Self::Ftrl { alpha: lr, .. } | Self::Rule { lr, .. } => (lr, None),
        }
    }

    /// The weight decay of rows that a step leaves alone, if they decay.
    pub(crate) fn idle_decay(&self) -> Option<f64> {
        match *self {
            Self::Sgd { weight_decay, catch_up: true, .. }
            | Self::Adamw { weight_decay, catch_up: true, .. }
            | Self::Lion { weight_decay, catch_up: true, .. } => {
                self.idle_momentum().is_none().then_some(weight_decay)
            }
            _ => None,
        }
    }

    /// The momentum of rows that a step leaves alone, and whether it is Nesterov's, if it carries them on.
    pub(crate) fn idle_momentum(&self) -> Option<(f64, bool)> {
        match *self {
            Self::Sgd { momentum, nesterov, catch_up: true, .. } if momentum > 0.0 => {
                Some((momentum, nesterov))
            }
            _ => None,
        }
    }

    /// Whether steps change rows that they leave alone.
    pub(crate) fn catches_up(&self) -> bool {
        self.idle_decay().is_some() || self.idle_momentum().is_some()
    }

    pub(super) fn validate(&self) -> Result<()> {
        let mut config = self.clone();
        let (lr, weight_decay) = config.tunables_mut();
        not_negative("optimizer.lr", *lr)?;
        not_negative("optimizer.weight_decay", weight_decay.map_or(0.0, |value| *value))?;
        match *self {
            Self::Sgd { momentum, nesterov, catch_up, weight_decay, .. } => {
                share("optimizer.momentum", momentum)?;
                require(momentum == 0.0 || weight_decay == 0.0 || !catch_up, || {
                    format!(
                        "optimizer.catch_up goes with momentum or with weight_decay: both are not caught up with, got {momentum} and {weight_decay}"
                    )
                })?;
                require(momentum > 0.0 || !nesterov, || {
                    "optimizer.nesterov needs a momentum above 0".to_owned()
                })
            }
            Self::Rule { ref name, .. } => require(!name.is_empty(), || {
                "optimizer.name, the name of the update rule, must not be empty".to_owned()
            }),
            Self::Adagrad { eps, lr_decay, .. } | Self::RowwiseAdagrad { eps, lr_decay, .. } => {
                not_negative("optimizer.lr_decay", lr_decay)?;
                positive("optimizer.eps", eps)
            }
            Self::Rmsprop { alpha, eps, momentum, .. } => {
                share("optimizer.alpha", alpha)?;
                share("optimizer.momentum", momentum)?;
                positive("optimizer.eps", eps)
            }
            Self::Adadelta { rho, eps, .. } => {
                share("optimizer.rho", rho)?;
                positive("optimizer.eps", eps)
            }
            Self::Adam { betas, eps, .. }
            | Self::Adamw { betas, eps, .. }
            | Self::RowwiseAdam { betas, eps, .. }
            | Self::Lamb { betas, eps, .. } => {
                shares("optimizer.betas", betas)?;
                positive("optimizer.eps", eps)
            }
            Self::Lion { betas, .. } => shares("optimizer.betas", betas),
            Self::Ftrl { alpha, beta, l1, l2 } => {
                positive("optimizer.alpha", alpha)?;
                not_negative("optimizer.beta", beta)?;
                not_negative("optimizer.l1", l1)?;
                not_negative("optimizer.l2", l2)?;
                require(beta as f32 + l2 as f32 > 0.0, || {
                    "optimizer.beta and optimizer.l2 must not both be 0".to_owned()
                })
            }
        }
    }
}

fn shares(key: &str, values: [f64; 2]) -> Result<()> {
    values.into_iter().try_for_each(|value| share(key, value))
}
