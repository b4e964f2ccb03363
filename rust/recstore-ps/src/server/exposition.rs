//! All metrics of a server as Prometheus' text, version 0.0.4.

use prometheus::{IntGauge, IntGaugeVec, Opts, Registry, Result, TextEncoder};
use recstore::{EmbeddingStore, TableStatistics};

use crate::durable::log::Lag;
use crate::handler::Handler;
use crate::metrics::{of_shard, registered};

/// Returns all metrics of a server as text.
///
/// # Errors
/// Tables whose figures do not fit the format.
pub(crate) fn exposition(handler: &Handler) -> Result<String> {
    let metrics = handler.metrics();
    let now = of_shard(metrics.shard())?;
    add_tables(handler.store(), &now)?;
    if let Some(lag) = handler.log_lag() {
        add_log(lag, &now)?;
    }
    metrics.checkpoints.add_last(&now)?;
    let mut families = metrics.registry.gather();
    families.extend(now.gather());
    TextEncoder::new().encode_to_string(&families)
}

fn add_tables(store: &dyn EmbeddingStore, to: &Registry) -> Result<()> {
    let gauge = |name, meaning| registered(to, IntGaugeVec::new(Opts::new(name, meaning), &["table"])?);
    let rows = gauge("recstore_table_rows", "Rows of a table on this shard.")?;
    let bytes = gauge("recstore_table_bytes", "Bytes of memory that a table takes on this shard.")?;
    let disk_bytes = gauge("recstore_table_disk_bytes", "Bytes on disk of rows that are not in memory.")?;
    for name in store.table_names().unwrap_or_default() {
        // One that was dropped a moment ago is left out.
        let Some(found) = statistics(store, &name) else { continue };
        for (gauge, value) in
            [(&rows, found.rows as u64), (&bytes, found.bytes as u64), (&disk_bytes, found.memory.disk_bytes)]
        {
            gauge.with_label_values(&[name.as_str()]).set(value as i64);
        }
    }
    Ok(())
}

fn statistics(store: &dyn EmbeddingStore, name: &str) -> Option<TableStatistics> {
    store.find_table(name).ok()??.statistics().ok()
}

fn add_log(lag: Lag, to: &Registry) -> Result<()> {
    let bytes = IntGauge::new("recstore_log_bytes", "Bytes of log behind the last checkpoint.")?;
    registered(to, bytes)?.set(lag.bytes as i64);
    let pending = "Changes in the log that the disk is not known to have yet.";
    registered(to, IntGauge::new("recstore_log_pending_changes", pending)?)?.set(lag.pending as i64);
    Ok(())
}
