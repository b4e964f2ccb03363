//! All metrics of a server as Prometheus' text, version 0.0.4.

use std::sync::atomic::Ordering;

use prometheus::{IntGauge, IntGaugeVec, Opts, Registry, Result, TextEncoder};
use recstore::{EmbeddingStore, TableStatistics};

use crate::durable::log::Lag;
use crate::handler::Handler;
use crate::metrics::{of_shard, registered};
use crate::wire::replica_role::Role;

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
    add_replication(handler, &now)?;
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

/// Adds how far followers are, or how far this server is behind the one that it follows.
fn add_replication(handler: &Handler, to: &Registry) -> Result<()> {
    let Some((followers, acknowledged)) = handler.followers() else { return Ok(()) };
    let standing = handler.standing();
    let gauge = |name, meaning| registered(to, IntGauge::new(name, meaning)?);
    let made = handler.last_change().unwrap_or_default();
    gauge("recstore_log_last_change", "The number of the last change in the log.")?.set(made as i64);
    gauge("recstore_leads", "1 if the server answers clients, 0 if it follows or was demoted.")?
        .set(standing.leads().into());
    gauge("recstore_epoch", "How often another server of the shard was promoted.")?
        .set(standing.epoch as i64);
    let progress = &handler.progress;
    if let Role::Follower { .. } = standing.role {
        let is_connected = progress.is_connected.load(Ordering::Relaxed);
        gauge("recstore_leader_connected", "1 if changes come from the server that this one follows.")?
            .set(is_connected.into());
        let behind = progress.leader_last.load(Ordering::Relaxed).saturating_sub(made);
        gauge(
            "recstore_leader_lag_changes",
            "Changes of the server that this one follows that are not here yet.",
        )?
        .set(behind as i64);
    }
    let of_follower =
        |name, meaning| registered(to, IntGaugeVec::new(Opts::new(name, meaning), &["follower"])?);
    let behind = of_follower(
        "recstore_follower_lag_changes",
        "Changes that a follower does not have on its disk yet.",
    )?;
    let in_step = of_follower(
        "recstore_follower_in_step",
        "1 if changes are acknowledged only when a follower has them.",
    )?;
    for known in followers {
        let follower = format!("{:032x}", known.follower.0);
        behind.with_label_values(&[&follower]).set(acknowledged.saturating_sub(known.confirmed) as i64);
        in_step.with_label_values(&[&follower]).set(known.is_in_step.into());
    }
    Ok(())
}

fn add_log(lag: Lag, to: &Registry) -> Result<()> {
    let bytes = IntGauge::new("recstore_log_bytes", "Bytes of log behind the last checkpoint.")?;
    registered(to, bytes)?.set(lag.bytes as i64);
    let left_out = "Bytes of the log's end that the start left out, cut short or damaged.";
    registered(to, IntGauge::new("recstore_log_left_out_bytes", left_out)?)?.set(lag.left_out as i64);
    let pending = "Changes in the log that the disk is not known to have yet.";
    registered(to, IntGauge::new("recstore_log_pending_changes", pending)?)?.set(lag.pending as i64);
    Ok(())
}
