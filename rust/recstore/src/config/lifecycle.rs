//! When an id gets a row, and when a row leaves.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::optimizer::ranges::{Range, require};

/// Which ids get a row by training. Until an id is admitted it reads as its initial value, and its gradients are
/// dropped; with `shared_rows` it reads and trains a row that it shares with others. A write gives it a row at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum AdmissionConfig {
    /// An id is admitted by the step that updates it for the `threshold`-th time. Each id without a row that was ever
    /// updated takes about 25 bytes.
    Count {
        /// The steps that must update it, that one included.
        threshold: u32,
        /// Every so many steps all counts are halved, and ids whose count comes to zero are forgotten: ids that come
        /// seldom are never admitted, and their counts take no memory for ever. They never are where it is absent.
        ///
        /// Source: Einziger, Friedman and Manes 2017, "TinyLFU: a highly efficient cache admission policy", section 3.3.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        halve_every: Option<u64>,
        /// So many rows are shared by the ids that have none of their own: each reads and trains the one that a hash of it
        /// names, and its own row starts from that one's weights. There are none where it is absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shared_rows: Option<u32>,
    },
    /// The same with counts of a sketch of fixed size: an id may be admitted early, never late. With a probability of
    /// at least `1 - delta` its count is too high by at most `epsilon` times all updates of ids without a row.
    ///
    /// Source: Cormode and Muthukrishnan 2005, "An improved data stream summary: the count-min sketch", theorem 1.
    Sketch {
        /// As for `count`.
        threshold: u32,
        /// The error of a count, as a share of all that was counted. The sketch has `e / epsilon` columns.
        #[serde(default = "default_epsilon")]
        epsilon: f64,
        /// How probable a greater error is. The sketch has `ln(1 / delta)` rows.
        #[serde(default = "default_delta")]
        delta: f64,
        /// As for `count`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        halve_every: Option<u64>,
        /// As for `count`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shared_rows: Option<u32>,
    },
    /// Each step that updates an id admits it with this probability, decided by the table's seed, the id and the step.
    Probability {
        /// From 0, which admits none, to 1.
        probability: f64,
        /// As for `count`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shared_rows: Option<u32>,
    },
}

/// Which rows leave. A sweep after every `interval`-th step chooses them, from the table as it is at that moment; `delay`
/// steps later, at the end of the step, they leave, unless they were updated or written meanwhile.
///
/// An id that left has its initial value again, and none of its optimizer state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictionConfig {
    /// Rows that no step has updated for more than so many steps leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u64>,
    /// Rows with a smaller L2 norm leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_norm: Option<f64>,
    /// Of more rows than this, as many as there are too many leave, the least by `policy`. Of a table whose rows are spread
    /// over several stores each keeps its share, rounded up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// Which rows are the least.
    #[serde(default)]
    pub policy: EvictionPolicy,
    /// Ids whose rows never leave.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<i64>,
    /// How many steps lie between two sweeps.
    #[serde(default = "default_interval")]
    pub interval: u64,
    /// How many steps after its sweep a row leaves, from 1 to `interval`; a tenth of that where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<u64>,
}

/// By what the rows of a table with a capacity are ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictionPolicy {
    /// The least recently updated ones leave; of these those updated in the fewest steps, then the lowest ids.
    #[default]
    Lru,
    /// Those updated in the fewest steps leave; of these the least recently updated ones, then the lowest ids.
    Lfu,
}

fn default_epsilon() -> f64 {
    1e-6
}
fn default_delta() -> f64 {
    0.01
}
fn default_interval() -> u64 {
    1_000
}

/// Rows are counted by 30 bits; what these take in bytes is checked with the table's records.
const MAX_SHARED_ROWS: u32 = 1 << 30;

/// The most ids that [`EvictionConfig::keep`] may name.
const MAX_KEPT_IDS: usize = 1 << 20;

/// Four GiB of counters.
const MAX_COUNTERS: f64 = (1u64 << 30) as f64;

impl AdmissionConfig {
    /// Returns how many steps lie between two halvings of what was counted.
    pub(crate) fn halve_every(&self) -> Option<u64> {
        match *self {
            Self::Count { halve_every, .. } | Self::Sketch { halve_every, .. } => halve_every,
            Self::Probability { .. } => None,
        }
    }

    /// Returns the bytes of a sketch's counters, which are there from the beginning.
    pub(crate) fn sketch_bytes(&self) -> u64 {
        match *self {
            Self::Sketch { epsilon, delta, .. } => {
                (counters_of(epsilon, delta) * size_of::<u32>() as f64) as u64
            }
            Self::Count { .. } | Self::Probability { .. } => 0,
        }
    }

    /// Returns how many rows ids without one share.
    pub fn shared_rows(&self) -> Option<u32> {
        match *self {
            Self::Count { shared_rows, .. }
            | Self::Sketch { shared_rows, .. }
            | Self::Probability { shared_rows, .. } => shared_rows,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        require(self.shared_rows().is_none_or(|rows| (1..=MAX_SHARED_ROWS).contains(&rows)), || {
            let got = self.shared_rows().unwrap_or_default();
            format!("admission.shared_rows must lie in [1, {MAX_SHARED_ROWS}], got {got}")
        })?;
        match *self {
            Self::Count { threshold, halve_every, .. } => {
                at_least_one("admission.threshold", threshold.into())?;
                at_least_one("admission.halve_every", halve_every.unwrap_or(1))
            }
            Self::Sketch { threshold, epsilon, delta, halve_every, .. } => {
                at_least_one("admission.threshold", threshold.into())?;
                at_least_one("admission.halve_every", halve_every.unwrap_or(1))?;
                within_one("admission.epsilon", epsilon)?;
                within_one("admission.delta", delta)?;
                require(counters_of(epsilon, delta) <= MAX_COUNTERS, || {
                    format!("a sketch with admission.epsilon {epsilon} and delta {delta} exceeds 4 GiB")
                })
            }
            Self::Probability { probability, .. } => {
                Range::Finite.check("admission.probability", probability)?;
                require((0.0..=1.0).contains(&probability), || {
                    format!("admission.probability must lie in [0, 1], got {probability}")
                })
            }
        }
    }
}

impl EvictionConfig {
    /// Returns how many rows one of so many stores keeps, if there is a capacity.
    pub(crate) fn share(&self, shards: usize) -> Option<u64> {
        self.capacity.map(|capacity| capacity.div_ceil(shards.max(1) as u64))
    }

    /// Returns how many steps after its sweep a row leaves.
    pub(crate) fn delay(&self) -> u64 {
        self.delay.unwrap_or_else(|| (self.interval / 10).max(1))
    }

    pub(super) fn validate(&self) -> Result<()> {
        require(self.ttl.is_some() || self.min_norm.is_some() || self.capacity.is_some(), || {
            "eviction needs ttl, min_norm or capacity".to_owned()
        })?;
        require(self.capacity.is_some() || self.policy == EvictionPolicy::default(), || {
            "eviction.policy orders the rows of a table with eviction.capacity, which is missing".to_owned()
        })?;
        require(self.keep.len() <= MAX_KEPT_IDS, || {
            format!("eviction.keep must have at most {MAX_KEPT_IDS} ids, got {}", self.keep.len())
        })?;
        for (key, value) in
            [("ttl", self.ttl), ("capacity", self.capacity), ("interval", Some(self.interval))]
        {
            at_least_one(&format!("eviction.{key}"), value.unwrap_or(1))?;
        }
        self.min_norm.map_or(Ok(()), |norm| Range::Positive.check("eviction.min_norm", norm))?;
        require((1..=self.interval).contains(&self.delay()), || {
            format!("eviction.delay must lie in [1, interval {}], got {}", self.interval, self.delay())
        })
    }
}

fn counters_of(epsilon: f64, delta: f64) -> f64 {
    // In floats, which do not wrap: the least epsilon gives infinity, and that is refused.
    (1f64.exp() / epsilon).ceil() * (1.0 / delta).ln().ceil()
}

fn at_least_one(key: &str, value: u64) -> Result<()> {
    require(value > 0, || format!("{key} must be at least 1, got {value}"))
}

fn within_one(key: &str, value: f64) -> Result<()> {
    require(value > 0.0 && value < 1.0, || format!("{key} must lie between 0 and 1, got {value}"))
}
