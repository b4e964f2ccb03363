//! One table: what it is, and the lock around its rows.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::access_stats::Usages;
use super::admission::Admission;
use super::budget::{Account, MemoryBudget};
use super::changes::Changes;
use super::cost::check_cost;
use super::ids::id_allocator::IdAllocator;
use super::ids::id_map::IdMap;
use super::ids::row_ids::RowIds;
use super::initial_values::initializer::Initializer;
use super::rows::{Rows, next_epoch};
use super::shared_rows::SharedRows;
use super::storage::slot_group::SlotGroup;
use super::storage::tier::Tier;
use super::table_rule::TableRule;
use crate::calls::{TableDescription, TableStatistics};
use crate::config::{AdmissionConfig, TableConfig};
use crate::kernel::hash::mix;
use crate::kernel::simd::Simd;
use crate::optimizer::{DecayFactor, PreparedRule, Slot, UpdateRules};
use crate::rows::any_row_type::{AnyRowType, with_row_type};
use crate::rows::row_type::RowType;
use crate::{Result, fork};

/// How many tables this process has made.
static TABLES: AtomicU64 = AtomicU64::new(0);

/// A named table.
pub(crate) struct Table {
    pub(super) name: String,
    pub(super) config: TableConfig,
    pub(super) initializer: Initializer,
    pub(super) optimizer: TableRule,
    pub(super) generation: u32,
    /// How many tables of the process are older; see `lock_order`.
    pub(super) age: u64,
    pub(super) refusals: AtomicU64,
    /// Over how many stores its rows are spread.
    shards: AtomicUsize,
    pub(super) rows: RwLock<Rows>,
}

impl Table {
    /// Returns a table without rows, whose memory counts in `budget`.
    ///
    /// # Errors
    /// [`crate::Error::Disk`] if its slot file cannot be made; [`crate::Error::UnknownRule`] for a rule that is not among
    /// `rules`; [`crate::Error::InvalidConfig`] and [`crate::Error::RuleFailed`] for one whose slots cannot be kept;
    /// [`crate::Error::InvalidConfig`] for a configuration that takes more memory at once than there may be.
    pub(crate) fn new(
        name: &str,
        config: &TableConfig,
        rules: &UpdateRules,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Self> {
        let optimizer = TableRule::new(name, config, rules)?;
        let storage = new_storage(config, optimizer.slots().to_vec());
        let initializer = Initializer::new(name, config);
        let shared = new_shared_rows(config, initializer.seed(), optimizer.slots());
        // Before there is a slot file: a table that costs too much leaves nothing behind.
        check_cost(name, config, shared.as_deref(), budget)?;
        let tier = new_tier(name, config, &storage)?;
        Ok(Self {
            name: name.to_owned(),
            config: config.clone(),
            initializer,
            optimizer,
            generation: fork::generation(),
            age: TABLES.fetch_add(1, Ordering::Relaxed),
            refusals: AtomicU64::new(0),
            shards: AtomicUsize::new(budget.shards()),
            rows: RwLock::new(Rows {
                ids: IdMap::default(),
                allocator: IdAllocator::default(),
                row_ids: RowIds::default(),
                changes: Changes::default(),
                storage,
                tier,
                broken: None,
                limit: config.memory_limit.unwrap_or(u64::MAX),
                account: Account::new(Arc::clone(budget)),
                admission: config.admission.as_ref().map(Admission::new),
                shared,
                usages: config.eviction.as_ref().map(|_| Usages::default()),
                sweep: None,
                epoch: next_epoch(),
                indices: Vec::new(),
                learning_rate: config.optimizer.learning_rate(),
                learning_rate_was_set: false,
                step: 0,
                kept: DecayFactor::default(),
                inserts: 0,
                updates: 0,
                writes: 0,
                deletes: 0,
                rejections: 0,
                evictions: 0,
            }),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn config(&self) -> &TableConfig {
        &self.config
    }

    /// Returns how weights are kept in records, converted with `simd`.
    pub(super) fn row_type(&self, simd: Simd) -> AnyRowType {
        AnyRowType { dtype: self.config.dtype, simd }
    }

    /// Returns the ids that have a row, in the order of their indices.
    pub(crate) fn ids(&self) -> Vec<i64> {
        self.shared().row_ids.all()
    }

    pub(crate) fn len(&self) -> usize {
        self.shared().ids.len()
    }

    /// Returns name, configuration, and the names and widths of the optimizer's slots.
    pub(crate) fn description(&self) -> TableDescription {
        TableDescription {
            name: self.name.clone(),
            config: self.config.clone(),
            slots: self.optimizer.slots().iter().map(|slot| (slot.name.to_string(), slot.width)).collect(),
        }
    }

    pub(crate) fn statistics(&self) -> TableStatistics {
        let rows = self.shared();
        let mut memory = rows.memory();
        if let Some(tier) = &rows.tier {
            tier.add_to(&mut memory);
        }
        TableStatistics {
            rows: rows.ids.len(),
            bytes: memory.bytes() as usize,
            memory,
            inserts: rows.inserts,
            updates: rows.updates,
            writes: rows.writes,
            deletes: rows.deletes,
            rejections: rows.rejections,
            evictions: rows.evictions,
            candidates: rows.admission.as_ref().map_or(0, Admission::num_candidates),
            shared_rows: rows.shared.as_ref().map_or(0, |shared| shared.len()),
            refusals: self.refusals.load(Ordering::Relaxed),
            step: rows.step,
            learning_rate: rows.learning_rate,
            learning_rate_was_set: rows.learning_rate_was_set,
            idle_kept: self.config.optimizer.idle_decay().map(|_| rows.kept.as_pair()),
            capacity_share: self.config.eviction.as_ref().and_then(|eviction| eviction.share(self.shards())),
        }
    }

    /// Returns the learning rate of the next step and whether it was set by hand.
    pub(crate) fn learning_rate(&self) -> (f64, bool) {
        let rows = self.shared();
        (rows.learning_rate, rows.learning_rate_was_set)
    }

    /// Sets the learning rate from the next step on. `explicit` marks it as set by hand, which
    /// [`TableStatistics::learning_rate_was_set`] reports.
    pub(crate) fn set_learning_rate(&self, lr: f64, explicit: bool) -> Result<()> {
        self.check_learning_rate(lr)?;
        self.check_writable("set_learning_rate", 0)?;
        let rows = &mut *self.exclusive();
        rows.learning_rate = lr;
        rows.learning_rate_was_set |= explicit;
        Ok(())
    }

    /// Sets over how many stores the rows are spread, from the next sweep on.
    pub(crate) fn set_shards(&self, shards: usize) {
        self.shards.store(shards, Ordering::Relaxed);
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.load(Ordering::Relaxed)
    }

    pub(super) fn shared(&self) -> RwLockReadGuard<'_, Rows> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn exclusive(&self) -> RwLockWriteGuard<'_, Rows> {
        self.rows.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rows of a table that nobody else has.
    pub(super) fn own_rows(&mut self) -> &mut Rows {
        self.rows.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rule of the last of `steps` steps, which the rows count already.
    pub(super) fn prepare_rule(&self, rows: &Rows, steps: u64) -> PreparedRule {
        self.optimizer.prepare(rows.learning_rate, rows.step.max(1), rows.kept, steps)
    }

    /// Halves what admission counted, once for each time that it came to be due since step `before`.
    pub(super) fn age_counts(&self, rows: &mut Rows, before: u64) {
        let every = self.config.admission.as_ref().and_then(AdmissionConfig::halve_every);
        let (Some(every), Some(admission)) = (every, &mut rows.admission) else { return };
        let times = (rows.step / every).saturating_sub(before / every);
        if times > 0 {
            admission.halve(u32::try_from(times).unwrap_or(u32::MAX));
        }
    }

    /// Returns what seeds the noise of rounding at a step.
    pub(super) fn noise(&self, step: u64) -> u64 {
        mix((self.initializer.seed() ^ mix(step as i64)) as i64)
    }
}

pub(super) fn new_storage(config: &TableConfig, slots: Vec<Slot>) -> SlotGroup {
    let words = with_row_type!(config.dtype, row_type => row_type.words(config.dim));
    match (&config.disk, config.memory_limit) {
        (Some(_), Some(limit)) => SlotGroup::within(words, limit, slots),
        _ => SlotGroup::new(words, config.block_size, slots),
    }
}

fn new_shared_rows(config: &TableConfig, seed: u64, slots: &[Slot]) -> Option<Box<SharedRows>> {
    config.shared_rows().map(|count| {
        let words = with_row_type!(config.dtype, row_type => row_type.words(config.dim));
        let records = SlotGroup::new(words, config.block_size.min(count as usize), slots.to_vec());
        Box::new(SharedRows::new(count, seed, records))
    })
}

pub(super) fn new_tier(name: &str, config: &TableConfig, storage: &SlotGroup) -> Result<Option<Box<Tier>>> {
    let tier =
        config.disk.as_ref().map(|directory| Tier::new(name, directory, storage.stride()).map(Box::new));
    tier.transpose()
}
