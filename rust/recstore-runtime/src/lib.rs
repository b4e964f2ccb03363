//! Runs the bundles of recstore-ops without Python: the program by libtorch's operators, the tables from their files.
//!
//! ```no_run
//! use recstore_runtime::{Bundle, Input};
//!
//! let bundle = Bundle::open("clicks.bundle".as_ref())?;
//! let ids: [i64; 4] = [7, 8, 9, 10];
//! let outputs = bundle.run(&[Input::new(&ids, &[2, 2])?])?;
//! let logits: &[f32] = outputs[0].values()?;
//! # Ok::<(), recstore_runtime::Error>(())
//! ```
//!
//! `librecstore_runtime.so` gives the same to C and C++, see `include/recstore_runtime.h`. Both run with the release of
//! libtorch that they were built against.

mod bundle;
mod c_api;
mod checked_json;
mod element;
mod error;
mod graph;
mod inputs;
mod manifest;
mod operators;
mod program;
mod state;

pub use bundle::{Bundle, Output};
pub use element::{DType, Element};
pub use error::{Error, Result};
pub use inputs::Input;
pub use manifest::Described;
pub use program::set_num_threads;
pub use recstore::FrozenMemory;
