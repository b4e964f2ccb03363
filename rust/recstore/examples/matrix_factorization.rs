//! Learns ratings as products of user and item rows: two tables of one store, trained together.
//!
//! `cargo run --release --example matrix_factorization`

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::sync::Arc;

use ndarray::{Array1, Array2, Axis};
use recstore::{EmbeddingStore, GradientCollector, LocalStore, Result, TableConfig, TableHandle, TableId};

const DIM: usize = 8;
const BATCH: usize = 256;

/// Returns users, items and ratings; ids need not be dense, nor known beforehand.
fn batch(number: usize) -> (Array1<i64>, Array1<i64>, Array1<f32>) {
    let position = |j: usize| number * BATCH + j;
    let users: Array1<i64> = (0..BATCH).map(|j| (position(j) * 7919 % 1000) as i64 * 1_000_003).collect();
    let items: Array1<i64> = (0..BATCH).map(|j| -((position(j) * 104_729 % 337) as i64)).collect();
    // Every user likes or dislikes odd items: one hidden factor.
    let likes = |(user, item): (&i64, &i64)| if (user / 1_000_003 + item) % 2 == 0 { 1.0 } else { -1.0 };
    let ratings = users.iter().zip(&items).map(likes).collect();
    (users, items, ratings)
}

/// Takes one step and returns the mean squared error before it.
fn step(user: &TableHandle<LocalStore>, item: &TableHandle<LocalStore>, number: usize) -> Result<f32> {
    let (users, items, ratings) = batch(number);
    let (user_rows, item_rows) = (user.read(users.view())?, item.read(items.view())?);
    let error = (&user_rows * &item_rows).sum_axis(Axis(1)) - ratings;
    let scaled = (&error * 2.0).insert_axis(Axis(1));
    let collector = GradientCollector::default();
    collect(&collector, user, &users, &scaled * &item_rows)?;
    collect(&collector, item, &items, &scaled * &user_rows)?;
    GradientCollector::apply_to(&**user.store(), &[&collector])?;
    Ok(error.mapv(|e| e * e).mean().unwrap_or(0.0))
}

fn collect(
    collector: &GradientCollector<TableId>,
    table: &TableHandle<LocalStore>,
    ids: &Array1<i64>,
    gradients: Array2<f32>,
) -> Result<()> {
    let (ids, gradients) = (ids.to_vec(), gradients.into_iter().collect::<Vec<_>>());
    collector.accept_copy(table.id(), &**table.table(), &ids, &gradients, table.dim())
}

fn main() -> Result<()> {
    let store = Arc::new(LocalStore::default());
    let config = TableConfig::from_json(
        DIM,
        r#"{"initializer": {"kind": "normal", "std": 0.1}, "optimizer": {"kind": "adagrad", "lr": 0.1}}"#,
    )?;
    let user = TableHandle::open(Arc::clone(&store), "user", &config)?;
    let item = TableHandle::open(Arc::clone(&store), "item", &config)?;
    for number in 0..=200 {
        let error = step(&user, &item, number)?;
        if number % 40 == 0 {
            println!("step {number:4}   mean squared error {error:.4}");
        }
    }
    for name in store.table_names()? {
        let table = TableHandle::open(Arc::clone(&store), &name, &config)?;
        println!("{name}: {} rows, {} updates", table.statistics()?.rows, table.statistics()?.updates);
    }
    Ok(())
}
