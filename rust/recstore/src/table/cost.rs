//! What a table takes at once, whatever rows it gets.

use super::budget::MemoryBudget;
use super::shared_rows::SharedRows;
use crate::config::{AdmissionConfig, TableConfig};
use crate::{Error, Result};

/// The most bytes that a table without a limit takes at once.
const MAX_BYTES_AT_ONCE: u64 = 1 << 40;

/// Checks that what is made as a whole, the shared rows and a sketch, fits in the limits of the table and its store.
///
/// # Errors
/// [`Error::InvalidConfig`] names the fields and what they come to.
pub(super) fn check_cost(
    name: &str,
    config: &TableConfig,
    shared: Option<&SharedRows>,
    budget: &MemoryBudget,
) -> Result<()> {
    let Some(admission) = &config.admission else { return Ok(()) };
    let limits = [config.memory_limit, budget.limit(), Some(MAX_BYTES_AT_ONCE)];
    let limit = limits.into_iter().flatten().min().unwrap_or(MAX_BYTES_AT_ONCE);
    let bytes = admission.sketch_bytes().saturating_add(shared.map_or(0, SharedRows::reserved_bytes) as u64);
    match bytes <= limit {
        true => Ok(()),
        false => Err(too_costly(name, config, admission, [bytes, limit])),
    }
}

fn too_costly(
    name: &str,
    config: &TableConfig,
    admission: &AdmissionConfig,
    [bytes, limit]: [u64; 2],
) -> Error {
    let rows = admission
        .shared_rows()
        .map(|rows| format!("admission.shared_rows {rows} of dim {} with the optimizer's state", config.dim));
    let sketch = match admission.sketch_bytes() {
        0 => None,
        bytes => Some(format!("the sketch of admission.epsilon and admission.delta ({bytes} bytes)")),
    };
    let costs: Vec<String> = [rows, sketch].into_iter().flatten().collect();
    Error::InvalidConfig {
        message: format!(
            "table \"{name}\": {} would take {bytes} bytes at once, more than the limit of {limit} (memory_limit, or 1 TiB)",
            costs.join(" and "),
        ),
    }
}
