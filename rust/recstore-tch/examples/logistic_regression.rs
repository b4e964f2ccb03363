//! Predicts clicks by logistic regression with tch: one weight a feature, trained by FTRL in the store.
//!
//! `cargo run --release --package recstore-tch --example logistic_regression`

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::sync::Arc;

use recstore_tch::{LocalStore, Result, TableConfig, TchTable};
use tch::{Device, Kind, Reduction, Tensor};

const BATCH: i64 = 512;
const FEATURES_A_ROW: i64 = 4;

/// Returns features `[BATCH, FEATURES_A_ROW]` and clicks `[BATCH]`.
///
/// The first feature is one of ten and decides; the others, of about a million, are noise.
fn batch() -> (Tensor, Tensor) {
    let on_cpu = |kind| (kind, Device::Cpu);
    let deciding = Tensor::randint(10, [BATCH, 1], on_cpu(Kind::Int64));
    let noise = Tensor::randint_low(10, 1_000_000, [BATCH, FEATURES_A_ROW - 1], on_cpu(Kind::Int64));
    let probabilities = deciding.lt(5).to_kind(Kind::Float).view([BATCH]) * 0.8 + 0.1;
    (Tensor::cat(&[deciding, noise], 1), probabilities.bernoulli())
}

fn main() -> Result<()> {
    tch::manual_seed(1);
    let config = TableConfig::from_json(
        1,
        r#"{"initializer": {"kind": "zeros"}, "optimizer": {"kind": "ftrl", "alpha": 0.1, "l1": 0.02}}"#,
    )?;
    let weights = TchTable::open(Arc::new(LocalStore::default()), "weights", &config)?;
    for step in 0..=500 {
        let (features, clicks) = batch();
        let looked_up = weights.lookup(&features)?;
        let logits = looked_up.rows().sum_dim_intlist([1i64, 2].as_slice(), false, Kind::Float);
        let loss = logits.binary_cross_entropy_with_logits::<Tensor>(&clicks, None, None, Reduction::Mean);
        loss.backward();
        looked_up.step()?;
        if step % 100 == 0 {
            let rows = weights.handle().statistics()?.rows;
            println!("step {step:3}   log loss {:.4}   rows {rows:7}", f64::try_from(loss)?);
        }
    }
    let deciding = weights.read(&Tensor::arange(10, (Kind::Int64, Device::Cpu)))?;
    println!("weights of the ten features that decide: {:.2?}", Vec::<f32>::try_from(deciding.view([-1]))?);
    let noise = weights.read(&Tensor::arange_start(10, 1_000_000, (Kind::Int64, Device::Cpu)))?;
    println!("weights of the others that are not zero: {}", i64::try_from(noise.ne(0).sum(Kind::Int64))?);
    Ok(())
}
