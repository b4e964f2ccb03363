//! The parts of a configuration that are objects of their own.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::initializer::InitializerConfig;
use super::lifecycle::{AdmissionConfig, EvictionConfig};
use crate::optimizer::OptimizerConfig;

/// The most bytes of a part whose `kind` says what it has: serde keeps all of it as a tree until it has found the kind.
const MAX_KIND_BYTES: usize = 4096;

pub(super) fn initializer<'de, D: Deserializer<'de>>(from: D) -> Result<InitializerConfig, D::Error> {
    of_kind("initializer", from).and_then(|part| part.ok_or_else(|| must_be_object("initializer", "null")))
}

pub(super) fn optimizer<'de, D: Deserializer<'de>>(from: D) -> Result<OptimizerConfig, D::Error> {
    of_kind("optimizer", from).and_then(|part| part.ok_or_else(|| must_be_object("optimizer", "null")))
}

pub(super) fn admission<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AdmissionConfig>, D::Error> {
    of_kind("admission", from)
}

pub(super) fn eviction<'de, D: Deserializer<'de>>(from: D) -> Result<Option<EvictionConfig>, D::Error> {
    object("eviction", &Box::<RawValue>::deserialize(from)?)
}

fn of_kind<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    key: &str,
    from: D,
) -> Result<Option<T>, D::Error> {
    let text = Box::<RawValue>::deserialize(from)?;
    match text.get().len() {
        bytes if bytes > MAX_KIND_BYTES => {
            Err(D::Error::custom(format!("{key} must have at most {MAX_KIND_BYTES} bytes, got {bytes}")))
        }
        _ => object(key, &text),
    }
}

/// Reads an object, or null. Serde would also take a list, its fields by position.
fn object<T: DeserializeOwned, E: Error>(key: &str, text: &RawValue) -> Result<Option<T>, E> {
    let text = text.get();
    match text.starts_with('{') || text == "null" {
        true => serde_json::from_str(text).map_err(E::custom),
        false => Err(must_be_object(key, text)),
    }
}

fn must_be_object<E: Error>(key: &str, got: &str) -> E {
    const SHOWN: usize = 100;
    let shown: String = got.chars().take(SHOWN).collect();
    E::custom(format!("{key} must be an object, got {shown}"))
}
