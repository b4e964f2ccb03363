//! Optimizer steps of tables, of whatever stores.

use recstore::{
    CollectedStep, EmbeddingStore, Error, GradientChunk, PartialStep, Result, Serial, Step, TableDescription,
    TableId, TableUpdate, TableValidator,
};
use recstore_ps::AsyncTarget;

use crate::guard::Failure;
use crate::registry::Registry;
use crate::stores::TableLocation;
use crate::tables::by_store;

impl Registry {
    /// Takes one optimizer step in each table. Of several stores those on servers come first, for they may fail; all are
    /// checked before any changes.
    pub(crate) fn take_steps(
        &self,
        operation: &'static str,
        steps: Vec<CollectedStep<'_, TableLocation>>,
    ) -> std::result::Result<(), PartialStep<TableLocation, Failure>> {
        let updates = steps.into_iter().map(|CollectedStep { table, chunks }| {
            (table, TableUpdate { table: table.table, chunks, step: Step::Next })
        });
        let groups = by_store(updates.collect());
        let places = groups.iter().flat_map(|(store, updates)| {
            updates.iter().map(|update| TableLocation { store: *store, table: update.table })
        });
        self.check_replicas(operation, places)
            .map_err(|error| PartialStep { error: error.into(), stepped: Vec::new() })?;
        let mut stepped = Vec::new();
        let failed = |store: usize, error, stepped: &[TableLocation]| PartialStep {
            error: self.name_dropped(operation, store, error),
            stepped: stepped.to_vec(),
        };
        // One store checks all of its tables by itself; several must not change before another one refuses.
        if groups.len() > 1 {
            for (store, updates) in &groups {
                check(&*self.store_numbered(*store), updates).map_err(|error| failed(*store, error, &[]))?;
            }
        }
        for (store, updates) in &groups {
            let result = self.noted_update(&*self.store_numbered(*store), *store, updates);
            if matches!(result, Ok(()) | Err(Error::StepCutShort(_))) {
                stepped.extend(
                    updates.iter().map(|update| TableLocation { store: *store, table: update.table }),
                );
            }
            result.map_err(|error| failed(*store, error, &stepped))?;
        }
        Ok(())
    }

    /// Takes steps in tables of the store that has a number, and notes the rows that they changed.
    fn noted_update(
        &self,
        store: &dyn EmbeddingStore,
        number: usize,
        updates: &[TableUpdate<'_>],
    ) -> Result<()> {
        let result = store.update(updates);
        // A step that was cut short has changed rows too: prefetches of them are read again.
        if matches!(result, Ok(_) | Err(Error::StepCutShort(_))) {
            self.note_updates(number, updates, !matches!(result, Ok(0)));
        }
        result.map(drop)
    }

    /// Notes the rows that steps changed; all, if some left.
    fn note_updates(&self, store: usize, updates: &[TableUpdate<'_>], some_left: bool) {
        for update in updates {
            let place = TableLocation { store, table: update.table };
            if some_left {
                self.prefetches().note(&place, None);
            } else {
                let mut ids = update.chunks.iter().flat_map(|chunk| chunk.ids());
                self.prefetches().note(&place, Some(&mut ids));
            }
        }
    }
}

/// Requests name tables by their numbers, and steps are noted as those of operators are.
impl AsyncTarget for &'static Registry {
    fn dim(&self, table: TableId) -> Result<usize> {
        Ok(self.numbered_table("emb_read", table.0)?.dim())
    }

    fn push(&self, table: TableId, ids: &[i64], gradients: &[f32], dim: usize) -> Result<()> {
        let (store, place) = self.place_of("emb_update", table.0)?;
        self.check_replicas("emb_update", [place])?;
        let chunks = vec![GradientChunk::new(ids, gradients, dim)];
        let updates = [TableUpdate { table: place.table, chunks, step: Step::Next }];
        self.noted_update(&*store, place.store, &updates)
    }

    fn pull(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        let (store, place) = self.place_of("emb_read", table.0)?;
        self.check_replicas("emb_read", [place])?;
        store.table("emb_read", place.table)?.read(ids, rows)
    }
}

/// Checks updates as their store would, so that one store is not changed before another refuses.
fn check(store: &dyn EmbeddingStore, updates: &[TableUpdate<'_>]) -> Result<()> {
    let table = |update: &TableUpdate<'_>| {
        let TableDescription { name, config, .. } = store.table("emb_update", update.table)?.describe()?;
        TableValidator::new(&name, &config)
    };
    let tables = updates.iter().map(table).collect::<Result<Vec<_>>>()?;
    TableValidator::merge(&Serial, &tables.iter().zip(updates).collect::<Vec<_>>()).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use recstore::{BagInput, FrozenStore, LocalStore, PoolingMode, TableConfig};

    use super::*;

    /// A table in each of two stores, under one name, and their handles.
    fn two_tables() -> (Registry, [i64; 2]) {
        let registry = Registry::new(
            Arc::new(LocalStore::new(Box::new(Serial))),
            Arc::new(FrozenStore::new(Box::new(Serial))),
        );
        let zeros = TableConfig::from_json(1, r#"{"initializer": {"kind": "zeros"}}"#).unwrap();
        let first = registry.open("t", &zeros).unwrap();
        registry.choose(Arc::new(LocalStore::new(Box::new(Serial))));
        assert!(registry.find_table("t").unwrap().is_none());
        let second = registry.open("t", &zeros).unwrap();
        (registry, [first.number, second.number])
    }

    fn step(registry: &Registry, gradients: &[(i64, [f32; 1])]) -> std::result::Result<(), Failure> {
        let mut steps = Vec::new();
        for (handle, gradient) in gradients {
            let table = registry.table("emb_update", *handle)?.place;
            steps.push(CollectedStep { table, chunks: vec![GradientChunk::new(&[5], gradient, 1)] });
        }
        registry.take_steps("emb_update", steps).map_err(|step| step.error)
    }

    #[test]
    fn tables_of_one_name_lie_apart_and_are_stepped_together_or_not_at_all() {
        let (registry, [first, second]) = two_tables();
        let rows = || {
            [first, second].map(|table| {
                let mut row = [9.0];
                registry.with_table("emb_read", table, |table| table.read(&[5], &mut row)).unwrap();
                row[0]
            })
        };
        registry.with_table("emb_write", second, |table| table.write(&[5], &[1.0])).unwrap();
        assert_eq!(rows(), [0.0, 1.0]);
        let refused = step(&registry, &[(second, [1.0]), (first, [f32::NAN])]).unwrap_err();
        assert!(refused.to_string().contains("gradient of id 5 at position 0 of table \"t\" holds NaN"));
        assert_eq!(rows(), [0.0, 1.0]);
        step(&registry, &[(first, [-100.0]), (second, [100.0])]).unwrap();
        assert_eq!(rows(), [1.0, 0.0]);
    }

    #[test]
    fn a_lookup_over_several_stores_and_a_dropped_table_are_refused() {
        let (registry, tables) = two_tables();
        let (ids, offsets) = (&[5, 6], &[0, 1, 2]);
        let input =
            BagInput { ids, offsets, mode: PoolingMode::Sum, per_sample_weights: None, padding_idx: None };
        let bag = |store: &dyn EmbeddingStore, tables: &[_]| {
            store.bag(tables, input, &mut [0.0; 2], &mut [], &mut [])
        };
        let refused = registry.with_tables("emb_bag", &tables, bag).unwrap_err().to_string();
        assert!(refused.starts_with("emb_bag: the tables of one lookup must lie together"), "{refused}");
        registry.store().drop_table("t").unwrap();
        let dropped = registry.with_table("emb_read", tables[1], |table| table.read(&[5], &mut [0.0]));
        assert_eq!(dropped.unwrap_err().to_string(), "emb_read: table \"t\" was dropped");
        let applied = step(&registry, &[(tables[1], [1.0])]).unwrap_err().to_string();
        assert_eq!(applied, "emb_update: table \"t\" was dropped");
        registry.use_embedded();
        assert!(registry.find_table("t").unwrap().is_some());
    }
}
