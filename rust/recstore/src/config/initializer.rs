//! Where the initial values of rows come from.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::optimizer::ranges::{Range, require};

/// Where the initial values of rows come from. Parameters are named as in `torch.nn.init`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum InitializerConfig {
    /// Zero.
    Zeros {},
    /// The same value everywhere.
    Constant {
        /// That value.
        value: f64,
    },
    /// Uniform between `a` and `b`.
    Uniform {
        /// The lower bound.
        #[serde(default)]
        a: f64,
        /// The upper bound.
        #[serde(default = "one")]
        b: f64,
    },
    /// Normal.
    Normal {
        /// The mean.
        #[serde(default)]
        mean: f64,
        /// The standard deviation.
        #[serde(default = "default_std")]
        std: f64,
    },
    /// Normal, cut to `[a, b]`.
    TruncatedNormal {
        /// The mean before the cut.
        #[serde(default)]
        mean: f64,
        /// The standard deviation before the cut.
        #[serde(default = "default_std")]
        std: f64,
        /// The lower bound; two standard deviations below the mean where absent.
        #[serde(default)]
        a: Option<f64>,
        /// The upper bound; two standard deviations above the mean where absent.
        #[serde(default)]
        b: Option<f64>,
    },
    /// Uniform within `gain * sqrt(6 / (num_embeddings + dim))` of zero; needs `num_embeddings`.
    ///
    /// Source: Glorot and Bengio 2010, equation 16, with the fans of a `[num_embeddings, dim]` matrix.
    XavierUniform {
        /// The factor before the root.
        #[serde(default = "one")]
        gain: f64,
    },
}

fn one() -> f64 {
    1.0
}
fn default_std() -> f64 {
    0.01
}

impl Default for InitializerConfig {
    fn default() -> Self {
        Self::Normal { mean: 0.0, std: default_std() }
    }
}

impl InitializerConfig {
    pub(super) fn validate(&self, num_embeddings: Option<u64>) -> Result<()> {
        match *self {
            Self::Zeros {} => Ok(()),
            Self::Constant { value } => Range::Finite.check("initializer.value", value),
            Self::Uniform { a, b } => {
                Range::Finite.check("initializer.a", a)?;
                Range::Finite.check("initializer.b", b)?;
                require(a <= b, || format!("initializer.a must not exceed initializer.b, got {a} and {b}"))
            }
            Self::Normal { mean, std } => {
                Range::Finite.check("initializer.mean", mean)?;
                Range::NotNegative.check("initializer.std", std)
            }
            Self::TruncatedNormal { mean, std, a, b } => {
                Range::Finite.check("initializer.mean", mean)?;
                Range::Positive.check("initializer.std", std)?;
                let (a, b) = (a.unwrap_or(mean - 2.0 * std), b.unwrap_or(mean + 2.0 * std));
                Range::Finite.check("initializer.a", a)?;
                Range::Finite.check("initializer.b", b)?;
                let reach = 8.0 * std;
                require(a < b && a < mean + reach && b > mean - reach, || {
                    format!(
                        "initializer.a must lie below initializer.b, both within 8 std of the mean's reach, got {a} and {b}"
                    )
                })
            }
            Self::XavierUniform { gain } => {
                Range::Finite.check("initializer.gain", gain)?;
                require(num_embeddings.is_some(), || {
                    "initializer xavier_uniform needs num_embeddings, for its bound depends on it".to_owned()
                })
            }
        }
    }
}
