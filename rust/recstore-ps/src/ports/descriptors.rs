//! How many descriptors the process may have, and how many of them connections take.

use std::sync::{Arc, OnceLock};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::pool::Pool;

/// More than this many are not asked for: some programs walk over all that there may be.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// The least that is left to files and to all else: tables, logs, checkpoints, the interpreter.
const MIN_RESERVE: u64 = 128;

static POOL: OnceLock<Arc<Pool>> = OnceLock::new();

/// Raises the limit of descriptors of this process as far as it may be, and returns the one before and the one from now
/// on.
pub fn raise_descriptor_limit() -> (u64, u64) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let before = current.unwrap_or(MAX_DESCRIPTORS);
    let wanted = maximum.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS);
    let raised = Rlimit { current: Some(wanted), maximum };
    let now = match wanted > before && setrlimit(Resource::Nofile, raised).is_ok() {
        true => wanted,
        false => before,
    };
    tracing::info!(before, now, "limit of descriptors");
    (before, now)
}

/// Returns the pool of this process's connections, whose size is that of its first use.
pub(crate) fn pool() -> Arc<Pool> {
    Arc::clone(POOL.get_or_init(|| {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(MAX_DESCRIPTORS);
        Arc::new(Pool::new(connections_of(limit)))
    }))
}

/// Tells how many connections there may be, louder if a port has fewer than were asked for.
pub(crate) fn tell_of_limits(max_connections: usize) {
    let (all_ports, descriptors) = (pool().limit(), getrlimit(Resource::Nofile).current);
    match all_ports < max_connections {
        false => tracing::info!(max_connections, all_ports, descriptors, "limit of connections"),
        true => tracing::warn!(
            max_connections,
            all_ports,
            descriptors,
            "all ports together have fewer connections than each may have: raise the limit of open files"
        ),
    }
}

/// Returns how many of so many descriptors are for connections. A quarter is for files, and no less than half of few.
fn connections_of(limit: u64) -> usize {
    let reserve = (limit / 4).max(MIN_RESERVE.min(limit / 2));
    usize::try_from(limit - reserve).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_keep_a_part_of_the_descriptors() {
        let limits = [0, 64, 256, 1024, 20_000];
        assert_eq!(limits.map(connections_of), [0, 32, 128, 768, 15_000]);
    }
}
