//! The configuration of a table as one JSON object.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::initializer::InitializerConfig;
use super::lifecycle::{AdmissionConfig, EvictionConfig};
use super::local_path::check_local_path;
use super::parts;
use crate::Result;
use crate::optimizer::ranges::{Range, invalid, require};
use crate::optimizer::{OptimizerConfig, StateDtype};
use crate::rows::dtype::Dtype;

/// A table's dim, bound, row type, initial values, optimizer and policy for non-finite values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TableConfig {
    /// The number of elements in a row. Not part of the JSON: calls name it beside the configuration.
    #[serde(skip)]
    pub dim: usize,
    /// Ids outside `[0, num_embeddings)` are refused; without it every id is valid.
    pub num_embeddings: Option<u64>,
    /// The type in which rows are kept.
    pub dtype: Dtype,
    /// Together with the table's name it seeds the initial values.
    pub seed: u64,
    /// The rows in one block of storage.
    pub block_size: usize,
    /// The value of a row that was never written.
    #[serde(deserialize_with = "parts::initializer")]
    pub initializer: InitializerConfig,
    /// The rule that turns gradients into new rows.
    #[serde(deserialize_with = "parts::optimizer")]
    pub optimizer: OptimizerConfig,
    /// The longest gradient of a row, by its norm: a longer one is scaled to it before the rule sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,
    /// The type of what the rule keeps for each element of a row.
    #[serde(skip_serializing_if = "StateDtype::is_float32")]
    pub state_dtype: StateDtype,
    /// The decay, a step of the table, of the moving average that is kept of each row; none is kept without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema_decay: Option<f64>,
    /// What happens to NaN and infinity in rows and gradients.
    pub nan_policy: NanPolicy,
    /// Which ids get a row by training; all of them without it.
    #[serde(deserialize_with = "parts::admission", skip_serializing_if = "Option::is_none")]
    pub admission: Option<AdmissionConfig>,
    /// Which rows leave; none without it.
    #[serde(deserialize_with = "parts::eviction", skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionConfig>,
    /// The most bytes of memory that the table may take. With `eviction` the least rows by its policy leave at once for new
    /// ones that would exceed it. Not part of checkpoints, as `disk` is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// A directory for the rows that `memory_limit` leaves no room for; without it and `eviction` the limit is an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
}

/// What a table does with a row or a gradient that holds a NaN or an infinity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NanPolicy {
    /// The call is refused and changes nothing.
    #[default]
    Error,
    /// The row is left out of the write, or the id of the gradient out of the step, and counted.
    Skip,
    /// It is taken as it is.
    Allow,
}

/// A weight and two moments. Some rules keep a third slot, and their blocks are by so much larger; what an optimizer
/// keeps once a row is little.
const MAX_FLOATS_PER_COLUMN: usize = 3;

/// One GiB a block, which any machine can reserve: only the pages of written rows are backed.
pub(crate) const MAX_FLOATS_PER_BLOCK: usize = 1 << 28;

impl Default for TableConfig {
    fn default() -> Self {
        Self {
            dim: 0,
            num_embeddings: None,
            dtype: Dtype::default(),
            seed: 0,
            block_size: 10_240,
            initializer: InitializerConfig::default(),
            optimizer: OptimizerConfig::default(),
            max_grad_norm: None,
            state_dtype: StateDtype::default(),
            ema_decay: None,
            nan_policy: NanPolicy::default(),
            admission: None,
            eviction: None,
            memory_limit: None,
            disk: None,
        }
    }
}

impl TableConfig {
    /// Returns the default configuration for rows of `dim` elements.
    pub fn new(dim: usize) -> Self {
        Self { dim, ..Self::default() }
    }

    /// Reads a JSON object; an empty text stands for the defaults.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] if the text is no JSON object, or names an unknown key or kind, or a value is
    /// out of its range.
    pub fn from_json(dim: usize, text: &str) -> Result<Self> {
        let config = Self { dim, ..Self::parse(text)? };
        config.validate().map(|()| config)
    }

    /// Reads a JSON object as [`TableConfig::from_json`] and sets its `num_embeddings`.
    ///
    /// # Errors
    /// As [`TableConfig::from_json`], and if the text names another `num_embeddings`.
    pub fn from_json_with_bound(dim: usize, text: &str, num_embeddings: u64) -> Result<Self> {
        let parsed = Self::parse(text)?;
        if let Some(named) = parsed.num_embeddings.filter(|&named| named != num_embeddings) {
            return Err(invalid(format!(
                "num_embeddings is {num_embeddings}, but the configuration says {named}"
            )));
        }
        let config = Self { dim, num_embeddings: Some(num_embeddings), ..parsed };
        config.validate().map(|()| config)
    }

    fn parse(text: &str) -> Result<Self> {
        let text = if text.trim().is_empty() { "{}" } else { text };
        // serde would also take a list, its fields by position.
        require(!text.trim_start().starts_with('['), || {
            "a configuration must be a JSON object, got a list".to_owned()
        })?;
        serde_json::from_str(text).map_err(|error| invalid(error.to_string()))
    }

    /// Returns the configuration as a JSON object, without the dim.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] if it cannot be written, which no valid configuration brings about.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| invalid(error.to_string()))
    }

    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] names the key, its value and its range.
    pub fn validate(&self) -> Result<()> {
        require(self.dim > 0, || "dim must be at least 1, got 0".to_owned())?;
        require(self.block_size > 0, || "block_size must be at least 1, got 0".to_owned())?;
        let block =
            self.dim.checked_mul(MAX_FLOATS_PER_COLUMN).and_then(|row| row.checked_mul(self.block_size));
        require(block.is_some_and(|floats| floats <= MAX_FLOATS_PER_BLOCK), || {
            format!(
                "a block of block_size rows of dim exceeds 1 GiB: lower block_size; got block_size {} and dim {}",
                self.block_size, self.dim
            )
        })?;
        require(self.num_embeddings.is_none_or(|bound| (1..=i64::MAX as u64).contains(&bound)), || {
            let got = self.num_embeddings.unwrap_or_default();
            format!("num_embeddings must be null or from 1 to {}, got {got}", i64::MAX)
        })?;
        require(self.memory_limit != Some(0), || "memory_limit must be null or positive, got 0".to_owned())?;
        require(self.disk.as_deref() != Some(""), || {
            "disk must be null or the name of a directory, got \"\"".to_owned()
        })?;
        let is_url = |disk: &str| check_local_path(Path::new(disk)).err();
        require(self.disk.as_deref().and_then(is_url).is_none(), || {
            let got = self.disk.as_deref().unwrap_or_default();
            format!("disk must be the path of a local directory, got \"{got}\"")
        })?;
        require(self.disk.is_none() || self.memory_limit.is_some(), || {
            "disk needs memory_limit: without a limit no row would ever go there".to_owned()
        })?;
        self.initializer.validate(self.num_embeddings)?;
        self.optimizer.validate()?;
        self.max_grad_norm.map_or(Ok(()), |most| Range::Positive.check("max_grad_norm", most))?;
        self.ema_decay.map_or(Ok(()), |decay| Range::Share.check("ema_decay", decay))?;
        self.check_state_dtype()?;
        self.check_catch_up()?;
        self.admission.as_ref().map_or(Ok(()), AdmissionConfig::validate)?;
        self.eviction.as_ref().map_or(Ok(()), EvictionConfig::validate)
    }

    /// Checks that the rule keeps something that a narrow type makes smaller, and that rounding does it no harm.
    fn check_state_dtype(&self) -> Result<()> {
        let refusal = self.optimizer.refuses_narrow_state().filter(|_| !self.state_dtype.is_float32());
        refusal.map_or(Ok(()), |reason| Err(invalid(format!("state_dtype {reason}"))))
    }

    /// Checks that rows that steps change while they leave them alone lie as they are read, and that nothing follows them.
    fn check_catch_up(&self) -> Result<()> {
        if !self.optimizer.catches_up() {
            return Ok(());
        }
        require(self.dtype == Dtype::Float32, || {
            format!("optimizer.catch_up needs rows of float32, got {}", self.dtype.name())
        })?;
        require(self.state_dtype == StateDtype::Float32, || {
            "optimizer.catch_up needs a state_dtype of float32".to_owned()
        })?;
        require(self.shared_rows().is_none(), || {
            "optimizer.catch_up and admission.shared_rows do not go together: shared rows are not caught up with"
                .to_owned()
        })?;
        require(self.ema_decay.is_none(), || {
            "optimizer.catch_up and ema_decay do not go together: the average of an idle row is that of one that stays"
                .to_owned()
        })
    }

    /// Returns how many rows the table's ids without one share, if they share any.
    pub fn shared_rows(&self) -> Option<u32> {
        self.admission.as_ref().and_then(AdmissionConfig::shared_rows)
    }

    /// Returns what a checkpoint keeps of the configuration: where rows lie is a matter of the machine.
    #[must_use]
    pub(crate) fn without_memory(&self) -> Self {
        Self { memory_limit: None, disk: None, ..self.clone() }
    }

    /// Whether a table opened as `self` may be opened again as `other`: all but learning rate and weight decay agree.
    pub fn is_same_table(&self, other: &Self) -> bool {
        let without = |config: &Self| Self { optimizer: OptimizerConfig::default(), ..config.clone() };
        without(self) == without(other) && self.optimizer.identity() == other.optimizer.identity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> String {
        TableConfig::from_json(4, text).unwrap_err().to_string()
    }

    #[test]
    fn an_empty_text_gives_the_documented_defaults() {
        let documented = r#"{"num_embeddings": null, "dtype": "float32", "seed": 0, "block_size": 10240,
            "initializer": {"kind": "normal", "mean": 0.0, "std": 0.01},
            "optimizer": {"kind": "sgd", "lr": 0.01}, "nan_policy": "error"}"#;
        assert_eq!(TableConfig::from_json(4, ""), TableConfig::from_json(4, documented));
    }

    #[test]
    fn a_configuration_survives_json() {
        let text = r#"{"num_embeddings": 9, "initializer": {"kind": "xavier_uniform"},
            "optimizer": {"kind": "ftrl", "alpha": 0.5, "l1": 0.25}}"#;
        let config = TableConfig::from_json(4, text).unwrap();
        assert_eq!(TableConfig::from_json(4, &config.to_json().unwrap()), Ok(config));
    }

    #[test]
    fn limit_and_disk_count_for_equality_and_are_written_only_if_given() {
        let text = r#"{"memory_limit":1000,"disk":"/tmp"}"#;
        let config = TableConfig::from_json(4, text).unwrap();
        assert!(config.to_json().unwrap().ends_with(r#","memory_limit":1000,"disk":"/tmp"}"#));
        assert!(!config.is_same_table(&config.without_memory()));
        assert_eq!(config.without_memory(), TableConfig::new(4));
        assert!(!TableConfig::new(4).to_json().unwrap().contains("disk"));
    }

    #[test]
    fn unknown_keys_and_kinds_are_refused_by_name() {
        assert!(message(r#"{"learning_rate": 1}"#).contains("learning_rate"));
        assert!(message(r#"{"optimizer": {"kind": "sign"}}"#).contains("sign"));
        assert!(message(r#"{"optimizer": {"kind": "sgd", "dampening": 0.9}}"#).contains("dampening"));
        assert!(message(r#"{"initializer": {"kind": "zeros", "std": 1}}"#).contains("std"));
        assert!(message(r#"{"dtype": "float8"}"#).contains("float8"));
    }

    #[test]
    fn values_out_of_range_are_refused_with_key_and_value() {
        for (text, key, value) in [
            (r#"{"optimizer": {"kind": "sgd", "lr": -1.5}}"#, "lr", "-1.5"),
            (r#"{"optimizer": {"kind": "adam", "betas": [0.9, 1.0]}}"#, "betas", "1"),
            (r#"{"optimizer": {"kind": "adagrad", "eps": 0}}"#, "eps", "0"),
            (r#"{"optimizer": {"kind": "ftrl", "alpha": 0}}"#, "alpha", "0"),
            (r#"{"initializer": {"kind": "normal", "std": -2}}"#, "std", "-2"),
            (r#"{"block_size": 0}"#, "block_size", "0"),
            (r#"{"max_grad_norm": 0}"#, "max_grad_norm", "0"),
            (r#"{"ema_decay": 1}"#, "ema_decay", "1"),
            (r#"{"num_embeddings": 0}"#, "num_embeddings", "0"),
            (r#"{"memory_limit": 0}"#, "memory_limit", "0"),
            (r#"{"memory_limit": 1, "disk": ""}"#, "disk", "\"\""),
            (r#"{"disk": "/tmp"}"#, "disk", "memory_limit"),
        ] {
            let message = message(text);
            assert!(message.contains(key) && message.contains(value), "{message}");
        }
        assert!(message(r#"{"initializer": {"kind": "xavier_uniform"}}"#).contains("num_embeddings"));
    }

    #[test]
    fn learning_rate_and_weight_decay_do_not_count_for_equality() {
        let config = |text| TableConfig::from_json(4, text).unwrap();
        let sgd = config(r#"{"optimizer": {"kind": "sgd", "lr": 0.5, "weight_decay": 0.1}}"#);
        assert!(sgd.is_same_table(&config("")));
        assert!(!sgd.is_same_table(&config(r#"{"seed": 1}"#)));
        assert!(!sgd.is_same_table(&config(r#"{"optimizer": {"kind": "adam"}}"#)));
    }
}
