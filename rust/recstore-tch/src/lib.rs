//! The embedding store for Rust programs that train with `tch` tensors.
//!
//! A [`TchTable`] reads and trains the rows of one table: ids of any shape `[..]` in, rows `[.., dim]` out. Rows looked
//! up by [`TchTable::lookup`] take part in a loss as any leaf tensor does; [`Lookup::step`] then gives their gradients
//! to the table's own optimizer.
//!
//! ```
//! use recstore_tch::{LocalStore, TableConfig, TchTable};
//! use std::sync::Arc;
//! use tch::{Kind, Tensor};
//!
//! # fn main() -> recstore_tch::Result<()> {
//! let config = TableConfig::from_json(4, r#"{"optimizer": {"kind": "adagrad", "lr": 0.1}}"#)?;
//! let user = TchTable::open(Arc::new(LocalStore::default()), "user", &config)?;
//! let ids = Tensor::from_slice(&[7i64, i64::MIN, 7]);
//! let looked_up = user.lookup(&ids)?;
//! let loss = (looked_up.rows() - 1.0).square().sum(Kind::Float);
//! loss.backward();
//! looked_up.step()?;
//! assert!(f64::try_from((user.read(&ids)? - 1.0).square().sum(Kind::Float))? < f64::try_from(loss)?);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod convert;
mod error;
mod lookup;
mod table;

pub use error::{Error, Result};
pub use lookup::Lookup;
pub use recstore::{EmbeddingStore, GradientCollector, LocalStore, TableConfig, TableHandle};
pub use table::TchTable;
