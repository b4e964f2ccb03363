//! Predicts clicks by logistic regression: one weight a feature, trained by FTRL, which keeps useless ones at zero.
//!
//! `cargo run --release --example logistic_regression`

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::sync::Arc;

use ndarray::{Array1, Array2};
use recstore::{LocalStore, Result, TableConfig, TableHandle};

const FEATURES: u64 = 1_000_000;
const FEATURES_PER_ROW: usize = 4;

/// Returns the features of an impression and whether it was clicked.
///
/// A million features exist; the first is one of ten and decides, the others are noise.
fn impression(number: u64) -> (Array1<i64>, f32) {
    let random = |salt: u64| {
        let mixed = (number * 8 + salt + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32
    };
    let deciding = random(0) % 10;
    let noise = (1..FEATURES_PER_ROW as u64).map(|salt| (10 + random(salt) % FEATURES) as i64);
    let features = std::iter::once(deciding as i64).chain(noise).collect();
    let probability = if deciding < 5 { 0.9 } else { 0.1 };
    (features, f32::from((random(7) % 1000) as f32 / 1000.0 < probability))
}

/// Returns the probability of a click on an impression with these features.
fn predict(weights: &TableHandle<LocalStore>, features: &Array1<i64>) -> Result<f32> {
    let logit: f32 = weights.read(features.view())?.sum();
    Ok(1.0 / (1.0 + (-logit).exp()))
}

fn main() -> Result<()> {
    let config = TableConfig::from_json(
        1,
        r#"{"initializer": {"kind": "zeros"}, "optimizer": {"kind": "ftrl", "alpha": 0.1, "l1": 2.0}}"#,
    )?;
    let weights = TableHandle::open(Arc::new(LocalStore::default()), "weights", &config)?;
    println!("impressions   log loss   rows");
    let mut loss = 0.0;
    for number in 1..=50_000 {
        let (features, clicked) = impression(number);
        let p = predict(&weights, &features)?;
        loss -= (if clicked == 1.0 { p } else { 1.0 - p }).max(1e-7).ln();
        let gradients = Array2::from_elem((features.len(), 1), p - clicked);
        weights.update(features.view(), gradients.view())?;
        if number % 10_000 == 0 {
            println!("{number:11} {:10.4} {:6}", loss / 10_000.0, weights.statistics()?.rows);
            loss = 0.0;
        }
    }
    let all: Array1<i64> = (0..FEATURES as i64 + 10).collect();
    let learned = weights.read(all.view())?;
    println!("weights of the ten features that decide: {:.2}", learned.slice(ndarray::s![..10, 0]));
    println!(
        "weights of the others that are not zero: {}",
        learned.iter().skip(10).filter(|w| **w != 0.0).count()
    );
    Ok(())
}
