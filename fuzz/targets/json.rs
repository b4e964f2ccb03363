//! The JSON of requests, answers, errors and configurations.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use recstore::{Metadata, TableConfig};
use recstore_ps::codec::{Managed, Management, WireError};
use serde::{Serialize, de::DeserializeOwned};

/// What is read is written, and read again as the same.
fn round_trip<T: DeserializeOwned + Serialize + Debug>(text: &str) {
    if let Ok(value) = serde_json::from_str::<T>(text) {
        let again: T = serde_json::from_str(&serde_json::to_string(&value).unwrap()).unwrap();
        assert_eq!(format!("{again:?}"), format!("{value:?}"));
    }
}

fuzz_target!(|text: &str| {
    round_trip::<Management>(text);
    round_trip::<Managed>(text);
    round_trip::<WireError>(text);
    if let Ok(config) = TableConfig::from_json(3, text) {
        assert_eq!(TableConfig::from_json(3, &config.to_json().unwrap()), Ok(config));
    }
    if let Ok(metadata) = Metadata::parse(text) {
        assert_eq!(Metadata::parse(metadata.as_str()), Ok(metadata));
    }
});
