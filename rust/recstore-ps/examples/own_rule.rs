//! A server with a rule of its own, and a worker that trains by it: predicts a line, most of whose points are noise.
//!
//! The rule steps by the sign of the gradient, however large that is, and by less at every sign that changes: one point
//! far off moves a weight no further than any other. The worker knows its name only.
//!
//! `cargo run --release --package recstore-ps --example own_rule`

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use recstore::{
    EmbeddingStore, InitializerConfig, LocalStore, OptimizerConfig, Serial, TableConfig, UpdateRule,
};
use recstore_ps::{AsyncConfig, AsyncStore, RemoteConfig, RemoteStore, Server, ServerConfig};

const SLOPE: f32 = 3.0;
const INTERCEPT: f32 = -2.0;
const STEPS: u64 = 2000;

/// `w -= lr * 0.5^(changes of sign, at most 10) * sign(g)`.
struct SignDescent;

impl UpdateRule for SignDescent {
    fn slots(&self, dim: usize) -> Vec<(String, usize)> {
        vec![("last_sign".into(), dim), ("changes".into(), dim)]
    }

    fn apply(&self, row: &mut [f32], slots: &mut [f32], gradient: &[f32], _: u64, learning_rate: f64) {
        let (last_signs, changes) = slots.split_at_mut(row.len());
        for (((w, g), last), changes) in row.iter_mut().zip(gradient).zip(last_signs).zip(changes) {
            let sign = if *g == 0.0 { 0.0 } else { g.signum() };
            if *last * sign < 0.0 {
                *changes = (*changes + 0.05).min(10.0);
            }
            *last = sign;
            *w -= learning_rate as f32 * 0.5f32.powf(*changes) * sign;
        }
    }
}

/// Returns a point: near the line, or, one in ten, anywhere.
fn point(number: u64) -> (f32, f32) {
    let random = |salt: u64| {
        let mixed = (number * 4 + salt + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0
    };
    let x = random(0);
    let noise = if number.is_multiple_of(10) { 1000.0 } else { 0.1 };
    (x, SLOPE * x + INTERCEPT + noise * random(1))
}

fn main() -> Result<(), Box<dyn Error>> {
    // The program of the server: a store that knows the rule.
    let tables = Arc::new(LocalStore::default());
    tables.register_rule("sign_descent", Arc::new(SignDescent))?;
    let server = Server::start(tables, ServerConfig::default())?;

    // The program of the worker: it names the rule, and pushes and pulls.
    let remote =
        RemoteStore::connect(RemoteConfig::new(vec![server.address().to_string()]), Box::new(Serial))?;
    let mut config = TableConfig::new(2);
    config.initializer = InitializerConfig::Zeros {};
    config.optimizer = OptimizerConfig::Rule { name: "sign_descent".into(), lr: 0.1 };
    let line = remote.open_table("line", &config)?;
    let worker = AsyncStore::new(Arc::new(remote), AsyncConfig::default())?;

    println!("  step   slope   intercept");
    let mut weights = worker.wait_rows(worker.pull(line.id(), [0], 0, None)?, None)?;
    for step in 1..=STEPS {
        let (x, y) = point(step);
        let error = weights[0] * x + weights[1] - y;
        let pulled = worker.push_pull(line.id(), [0], [error * x, error], 0, None)?;
        weights = worker.wait_rows(pulled, None)?;
        if step % 400 == 0 {
            println!("{step:6} {:7.3} {:11.3}", weights[0], weights[1]);
        }
    }
    worker.wait_all(None)?;
    drop(worker);
    server.stop(Duration::from_secs(1));
    if (weights[0] - SLOPE).abs() > 0.1 || (weights[1] - INTERCEPT).abs() > 0.1 {
        return Err(format!("the line is {weights:?}, expected {SLOPE} and {INTERCEPT}").into());
    }
    Ok(())
}
