//! Tables of which each process of a job would train a copy of its own.
//!
//! Whoever makes a module asks how many processes there are; but a job may begin later. So whatever finds a table looks
//! here, too.

use std::collections::BTreeSet;

use crate::guard::Failure;
use crate::stores::{EMBEDDED, Placed, TableLocation};

/// The processes of the job, and the tables that they share.
#[derive(Default)]
pub(crate) struct Replicas {
    /// 0 or 1 without a job.
    processes: usize,
    /// The tables of which each process has a part.
    sharded: BTreeSet<TableLocation>,
}

impl Replicas {
    /// Notes of how many processes the job consists.
    pub(crate) fn set_job_size(&mut self, processes: usize) {
        self.processes = processes;
    }

    /// Notes that each process of the job has a part of a table.
    pub(crate) fn note_sharded(&mut self, place: TableLocation) {
        self.sharded.insert(place);
    }

    /// Whether a table is none of which each process of the job has a copy.
    pub(crate) fn may_use(&self, place: TableLocation) -> bool {
        self.processes < 2 || place.store != EMBEDDED || self.sharded.contains(&place)
    }

    /// Refuses a table that none may use.
    pub(crate) fn check(&self, operation: &str, placed: &Placed) -> Result<(), Failure> {
        if self.may_use(placed.place) {
            return Ok(());
        }
        Err(Failure::of(operation, format!("{operation}: {}", self.refusal(placed.table.name()))))
    }

    /// Refuses the table of a name in a store, where it may not be there yet.
    pub(crate) fn check_named(
        &self,
        operation: &str,
        name: &str,
        store: usize,
        placed: Option<&Placed>,
    ) -> Result<(), Failure> {
        if self.processes < 2 || store != EMBEDDED || placed.is_some_and(|placed| self.may_use(placed.place))
        {
            return Ok(());
        }
        Err(Failure::of(operation, format!("{operation}: {}", self.refusal(name))))
    }

    /// Says why none may use a table.
    pub(crate) fn refusal(&self, table: &str) -> String {
        format!(
            "table \"{table}\" is embedded in each of {} processes, and the copies would drift apart; give its module a \
             process_group, over which it is sharded, and make it after init_process_group",
            self.processes
        )
    }
}

#[cfg(test)]
mod tests {
    use recstore::{EmbeddingStore, LocalStore, TableConfig};

    use super::*;

    #[test]
    fn a_job_of_several_processes_may_use_what_is_sharded_or_on_servers() {
        let store = LocalStore::default();
        let table = store.open_table("user", &TableConfig::new(1)).unwrap();
        let (own, on_servers) = (Placed::new(EMBEDDED, table.clone()), Placed::new(2, table));
        let mut replicas = Replicas::default();
        for processes in [0, 1] {
            replicas.set_job_size(processes);
            assert!(replicas.check("emb_read", &own).is_ok());
            assert!(replicas.check_named("emb_read", "default/1", EMBEDDED, None).is_ok());
        }
        replicas.set_job_size(2);
        let refused = replicas.check("emb_read", &own).unwrap_err().to_string();
        assert!(
            refused.starts_with("emb_read: table \"user\" is embedded in each of 2 processes"),
            "{refused}"
        );
        let refused = replicas.check_named("emb_write", "default/1", EMBEDDED, None).unwrap_err().to_string();
        assert!(refused.starts_with("emb_write: table \"default/1\" is embedded in each"), "{refused}");
        assert!(replicas.check("emb_read", &on_servers).is_ok());
        assert!(replicas.check_named("emb_read", "default/1", 2, None).is_ok());
        replicas.note_sharded(own.place);
        assert!(replicas.check("emb_read", &own).is_ok());
        assert!(replicas.check_named("emb_read", "user", EMBEDDED, Some(&own)).is_ok());
    }
}
