//! The tables of a store by name and by number.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::calls::TableId;
use crate::config::TableConfig;
use crate::optimizer::UpdateRules;
use crate::table::{MemoryBudget, Table, replace_rows};
use crate::{Error, Result};

/// The tables that a store keeps.
#[derive(Default)]
pub(super) struct Tables {
    by_name: HashMap<String, TableId>,
    /// Ordered: among so few numbers a search takes less time than a hash.
    by_id: BTreeMap<TableId, Arc<Table>>,
    last: i64,
}

impl Tables {
    /// Makes a table, or returns that of the name if its configuration agrees.
    pub(super) fn open(
        &mut self,
        name: &str,
        config: &TableConfig,
        rules: &UpdateRules,
        budget: &Arc<MemoryBudget>,
    ) -> Result<(TableId, Arc<Table>)> {
        if let Some(id) = self.by_name.get(name) {
            return self.check_same(*id, config).map(|table| (*id, Arc::clone(table)));
        }
        // Before the name is given away: a table that cannot be made leaves no name behind.
        let table = Arc::new(Table::new(name, config, rules, budget)?);
        let id = self.add_name(name);
        self.by_id.insert(id, Arc::clone(&table));
        Ok((id, table))
    }

    /// Adds a table whose name no other has.
    pub(super) fn add(&mut self, table: Table) -> Result<(TableId, Arc<Table>)> {
        self.check_free(table.name())?;
        let id = self.add_name(table.name());
        let table = Arc::new(table);
        self.by_id.insert(id, Arc::clone(&table));
        Ok((id, table))
    }

    /// Checks that a new table can have the name.
    pub(super) fn check_free(&self, name: &str) -> Result<()> {
        let message = match name {
            "" => "the table's name must not be empty".to_owned(),
            name if self.by_name.contains_key(name) => format!("there is a table \"{name}\" already"),
            _ => return Ok(()),
        };
        Err(Error::InvalidConfig { message })
    }

    /// Returns a table and its number, if there is one of the name.
    pub(super) fn find(&self, name: &str) -> Option<(TableId, Arc<Table>)> {
        let id = *self.by_name.get(name)?;
        self.by_id.get(&id).map(|table| (id, Arc::clone(table)))
    }

    /// Returns the names of all tables, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.by_name.keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Returns a table by its number.
    pub(super) fn get(&self, operation: &'static str, id: TableId) -> Result<Arc<Table>> {
        self.by_id.get(&id).cloned().ok_or(Error::UnknownHandle { operation, handle: id.0 })
    }

    /// Returns all tables.
    pub(super) fn all(&self) -> Vec<Arc<Table>> {
        self.by_id.values().cloned().collect()
    }

    /// Returns the configuration with which a saved table is loaded: that of the table of its name, if there is one.
    pub(super) fn config_for(&self, name: &str, saved: &TableConfig) -> Result<TableConfig> {
        match self.by_name.get(name) {
            None => Ok(saved.clone()),
            Some(id) => {
                // Taken from the table that is there, so that they cannot make the two unlike.
                let (memory_limit, disk) = self.memory_of(*id);
                let saved = TableConfig { memory_limit, disk, ..saved.clone() };
                self.check_same(*id, &saved).map(|table| table.config().clone())
            }
        }
    }

    /// Returns the limit and the disk of a table, which a checkpoint knows nothing of.
    fn memory_of(&self, id: TableId) -> (Option<u64>, Option<String>) {
        let config = self.by_id.get(&id).map(|table| table.config());
        config.map_or((None, None), |config| (config.memory_limit, config.disk.clone()))
    }

    /// Puts the rows of tables in the place of those of their names, at one moment; new ones get the numbers asked for,
    /// where those are free.
    pub(super) fn replace(
        &mut self,
        tables: Vec<Table>,
        numbers: Option<&BTreeMap<String, TableId>>,
    ) -> Result<()> {
        // All are checked before the first is replaced.
        for table in &tables {
            self.config_for(table.name(), table.config())?;
            if let Some((_, existing)) = self.find(table.name()) {
                existing.check_droppable("load")?;
            }
        }
        let mut replaced = Vec::new();
        for table in tables {
            match self.find(table.name()) {
                Some((_, existing)) => replaced.push((existing, table)),
                None => {
                    let asked_for = numbers.and_then(|numbers| numbers.get(table.name()));
                    let id = self.add_name_as(table.name(), asked_for.copied());
                    self.by_id.insert(id, Arc::new(table));
                }
            }
        }
        replace_rows(replaced);
        Ok(())
    }

    /// Gives a new table's name a number.
    fn add_name(&mut self, name: &str) -> TableId {
        self.add_name_as(name, None)
    }

    /// Gives a new table's name the number asked for, if that is free.
    fn add_name_as(&mut self, name: &str, asked_for: Option<TableId>) -> TableId {
        let is_free = |number: &TableId| number.0 > 0 && !self.by_id.contains_key(number);
        let number = asked_for.filter(is_free).unwrap_or(TableId(self.last + 1));
        // Numbers that were asked for count too: none is given twice.
        self.last = self.last.max(number.0);
        self.by_name.insert(name.to_owned(), number);
        number
    }

    /// Returns a table if it may be opened again as `requested`.
    fn check_same(&self, id: TableId, requested: &TableConfig) -> Result<&Arc<Table>> {
        let table =
            self.by_id.get(&id).ok_or(Error::UnknownHandle { operation: "open_table", handle: id.0 })?;
        if table.config().is_same_table(requested) {
            return Ok(table);
        }
        let shown = |config: &TableConfig| Ok(format!("dim {} {}", config.dim, config.to_json()?));
        Err(Error::ConfigMismatch {
            table: table.name().to_owned(),
            existing: shown(table.config())?,
            requested: shown(requested)?,
        })
    }

    /// Forgets a table and its number.
    pub(super) fn drop_table(&mut self, name: &str) -> Result<()> {
        let unknown = || Error::UnknownTable { operation: "drop_table", table: name.to_owned() };
        let id = *self.by_name.get(name).ok_or_else(unknown)?;
        let table = self.by_id.get(&id).ok_or_else(unknown)?;
        table.check_droppable("drop_table")?;
        self.by_name.remove(name);
        self.by_id.remove(&id);
        Ok(())
    }
}
