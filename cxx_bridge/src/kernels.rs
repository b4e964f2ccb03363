//! What each operator does, on slices. `ops.cpp` has checked shapes and dtypes and staged the tensors on the host.
//!
//! A table is given by its number, which [`find_table`] and [`check_dim`] read from the words of its handle. Every function
//! here runs behind [`guard`]: an error or a panic becomes an exception.

use std::collections::BTreeMap;

use cxx::SharedPtr;
use recstore::{
    BagInput, CollectedStep, EmbeddingTable, Error, GradientChunk, GradientCollector, KeptGradients,
    MergedGradients, PoolingMode, PrefetchId, Step, TableConfig, TableUpdate,
};

use crate::executor::TorchThreads;
use crate::ffi::KeptTensors;
use crate::guard::{Failure, guard};
use crate::handle_words::{HANDLE_WORDS, HandleWords};
use crate::kept::{TensorPart, bag_parts};
use crate::registry::registry;

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// The words of a handle.
pub(crate) fn handle_words() -> usize {
    HANDLE_WORDS
}

/// The number of the table that the words of a handle mean.
pub(crate) fn find_table(operation: &str, words: &[i64]) -> Outcome<i64> {
    guard(|| registry()?.number_of(operation, words))
}

pub(crate) fn make_hashtable(name: &str, dim: i64, config: &str) -> Outcome<Box<Ids>> {
    guard(|| {
        let handle = registry()?.open(name, &TableConfig::from_json(checked_dim(dim)?, config)?)?;
        Ok(Box::new(Ids(handle.to_words().to_vec())))
    })
}

pub(crate) fn init_embedding_table(name: &str, num_embeddings: i64, dim: i64, config: &str) -> Outcome<bool> {
    guard(|| {
        let bound = u64::try_from(num_embeddings).ok().filter(|&bound| bound > 0);
        let bound = bound.ok_or_else(|| {
            Failure::Runtime(format!(
                "init_embedding_table: num_embeddings must be positive, got {num_embeddings}"
            ))
        })?;
        let config = TableConfig::from_json_with_bound(checked_dim(dim)?, config, bound)?;
        registry()?.store().open_table(name, &config)?;
        Ok(true)
    })
}

pub(crate) fn hashtable_release(words: &[i64]) -> Outcome {
    guard(|| registry()?.release(HandleWords::read("hashtable_release", words)?))
}

pub(crate) fn drop_table(name: &str) -> Outcome {
    guard(|| Ok(registry()?.store().drop_table(name)?))
}

pub(crate) fn set_learning_rate(table: i64, lr: f64) -> Outcome {
    guard(|| registry()?.with_table("set_learning_rate", table, |table| table.set_learning_rate(lr, true)))
}

/// How messages speak of a table: for the shape checks in C++.
pub(crate) fn table_text(operation: &str, words: &[i64]) -> Outcome<String> {
    guard(|| {
        let registry = registry()?;
        let number = registry.number_of(operation, words)?;
        Ok(format!("table \"{}\"", registry.table(operation, number)?.table.name()))
    })
}

/// Checks a table's dim before rows of that size are made, and returns the table's number.
pub(crate) fn check_dim(operation: &str, what: &str, words: &[i64], dim: usize) -> Outcome<i64> {
    guard(|| registry()?.check_dim(operation, what, words, dim))
}

pub(crate) fn emb_read(table: i64, ids: &[i64], rows: &mut [f32]) -> Outcome {
    guard(|| registry()?.with_table("emb_read", table, |table| table.read(ids, rows)))
}

/// `places` has room for one place an id and a tag.
pub(crate) fn emb_read_places(table: i64, ids: &[i64], rows: &mut [f32], places: &mut [u32]) -> Outcome {
    guard(|| registry()?.with_table("emb_read", table, |table| table.read_with_places(ids, rows, places)))
}

pub(crate) fn emb_read_default(dim: usize, ids: &[i64], rows: &mut [f32]) -> Outcome {
    guard(|| match registry()?.default_table("emb_read", dim)? {
        Some(placed) => Ok(placed.table.read(ids, rows)?),
        None => {
            rows.fill(0.0);
            Ok(())
        }
    })
}

pub(crate) fn emb_write(table: i64, ids: &[i64], rows: &[f32]) -> Outcome {
    guard(|| registry()?.change_table("emb_write", table, Some(ids), |table| table.write(ids, rows)))
}

pub(crate) fn emb_write_default(dim: usize, ids: &[i64], rows: &[f32]) -> Outcome {
    guard(|| registry()?.change_default_table("emb_write", dim, ids, |_, table| table.write(ids, rows)))
}

pub(crate) fn emb_update(table: i64, ids: &[i64], gradients: &[f32], dim: usize) -> Outcome {
    const OPERATION: &str = "emb_update";
    guard(|| {
        let registry = registry()?;
        let table = registry.table(OPERATION, table)?.place;
        let chunks = vec![GradientChunk::new(ids, gradients, dim)];
        registry.take_steps(OPERATION, vec![CollectedStep { table, chunks }]).map_err(|step| step.error)
    })
}

pub(crate) fn emb_update_default(dim: usize, ids: &[i64], gradients: &[f32]) -> Outcome {
    guard(|| {
        registry()?.change_default_table("emb_update", dim, ids, |store, table| {
            let chunks = vec![GradientChunk::new(ids, gradients, dim)];
            store.update(&[TableUpdate { table: table.id(), chunks, step: Step::Next }]).map(drop)
        })
    })
}

/// `per_sample_weights` is empty for none, `padding_idx` holds one id or none, `places` is empty or has room for all
/// ids and a tag for each table.
#[expect(clippy::too_many_arguments, reason = "they are the operator's")]
pub(crate) fn emb_bag(
    tables: &[i64],
    ids: &[i64],
    offsets: &[i64],
    mode: i64,
    per_sample_weights: &[f32],
    padding_idx: &[i64],
    pooled: &mut [f32],
    max_positions: &mut [i64],
    places: &mut [u32],
) -> Outcome {
    guard(|| {
        let input = BagInput {
            ids,
            offsets,
            mode: pooling_mode(mode)?,
            per_sample_weights: (!per_sample_weights.is_empty()).then_some(per_sample_weights),
            padding_idx: padding_idx.first().copied(),
        };
        registry()?.with_tables("emb_bag", tables, |store, tables| {
            store.bag(tables, input, pooled, max_positions, places)
        })
    })
}

/// Checks what cuts ids into parts, and calls it `what`.
pub(crate) fn check_offsets(operation: &str, what: &str, offsets: &[i64], num_ids: usize) -> Outcome {
    recstore::check_offsets(offsets, num_ids).map_err(|error| match error {
        Error::InvalidBag { message } => {
            Failure::of(operation, format!("{operation}: {}", message.replacen("offsets", what, 1)))
        }
        error => error.into(),
    })
}

fn pooling_mode(mode: i64) -> Outcome<PoolingMode> {
    match mode {
        0 => Ok(PoolingMode::Sum),
        1 => Ok(PoolingMode::Mean),
        2 => Ok(PoolingMode::Max),
        _ => Err(Failure::of(
            "emb_bag",
            format!("emb_bag: mode must be 0 (sum), 1 (mean) or 2 (max), got {mode}"),
        )),
    }
}

pub(crate) fn emb_prefetch(table: i64, ids: &[i64]) -> Outcome<i64> {
    guard(|| {
        let registry = registry()?;
        Ok(registry.prefetches().issue(vec![registry.request(table, ids)?])?.0)
    })
}

pub(crate) fn emb_prefetch_default(dim: usize, ids: &[i64]) -> Outcome<i64> {
    guard(|| Ok(registry()?.prefetch_default(dim, ids)?.0))
}

/// The ids of table t lie from `splits[t]` up to `splits[t + 1]`.
pub(crate) fn emb_prefetch_tables(tables: &[i64], ids: &[i64], splits: &[i64]) -> Outcome<i64> {
    guard(|| {
        // First, as the ids are cut by the splits.
        check_offsets("emb_prefetch", "splits", splits, ids.len())?;
        let registry = registry()?;
        let parts = splits.windows(2).map(|pair| &ids[pair[0] as usize..pair[1] as usize]);
        let requests = tables.iter().zip(parts).map(|(&table, ids)| registry.request(table, ids));
        Ok(registry.prefetches().issue(requests.collect::<Outcome<_>>()?)?.0)
    })
}

/// Waits for the rows of a prefetch and consumes it. `dims` holds the dim that the rows of its one table must have,
/// or none for any tables.
pub(crate) fn emb_wait(prefetch: i64, dims: &[i64]) -> Outcome<Box<Fetched>> {
    guard(|| {
        let (registry, id) = (registry()?, PrefetchId(prefetch));
        let issued = registry.issued_dims(id)?;
        // Before it is consumed: a wrong dim leaves the prefetch as it was.
        if !dims.is_empty() && !issued.iter().map(|&dim| dim as i64).eq(dims.iter().copied()) {
            return Err(Failure::Runtime(format!(
                "emb_wait_result: prefetch handle {prefetch} has rows of dims {issued:?}, got dim {}",
                dims[0]
            )));
        }
        let deferred = registry.take_deferred(id);
        let matrices = registry.prefetches().wait(id)?;
        let Some((ids, dim)) = deferred else {
            return Ok(Box::new(Fetched { dims: issued, matrices }));
        };
        let mut rows = vec![0.0; ids.len() * dim];
        emb_read_default(dim, &ids, &mut rows)?;
        Ok(Box::new(Fetched { dims: issued, matrices: vec![rows] }))
    })
}

/// How many prefetches were dropped because nobody consumed them.
pub(crate) fn num_prefetches_dropped() -> Outcome<u64> {
    guard(|| Ok(registry()?.prefetches().num_dropped()))
}

/// The rows of a prefetch, one matrix a table.
pub(crate) struct Fetched {
    dims: Vec<usize>,
    matrices: Vec<Vec<f32>>,
}

impl Fetched {
    pub(crate) fn num_tables(&self) -> usize {
        self.dims.len()
    }

    pub(crate) fn table_dim(&self, table: usize) -> usize {
        self.dims[table]
    }

    pub(crate) fn rows(&self, table: usize) -> &[f32] {
        &self.matrices[table]
    }
}

pub(crate) fn hashtable_lookup(
    table: i64,
    ids: &[i64],
    insert: bool,
    indices: &mut [i64],
    rows: &mut [f32],
) -> Outcome {
    guard(|| {
        registry()?.with_table("hashtable_lookup", table, |table| table.lookup(ids, insert, indices, rows))
    })
}

pub(crate) fn hashtable_delete(table: i64, ids: &[i64]) -> Outcome {
    guard(|| {
        let delete = |table: &dyn EmbeddingTable| table.delete(ids).map(drop);
        registry()?.change_table("hashtable_delete", table, Some(ids), delete)
    })
}

pub(crate) fn hashtable_clear(table: i64) -> Outcome {
    guard(|| registry()?.change_table("hashtable_clear", table, None, |table| table.clear()))
}

pub(crate) fn hashtable_ids(table: i64) -> Outcome<Box<Ids>> {
    guard(|| {
        let ids = registry()?.with_table("hashtable_ids", table, |table| table.ids())?;
        Ok(Box::new(Ids(ids)))
    })
}

pub(crate) fn hashtable_size(table: i64) -> Outcome<i64> {
    guard(|| {
        let rows = registry()?.with_table("hashtable_size", table, |table| table.num_rows())?;
        Ok(rows as i64)
    })
}

pub(crate) fn hashtable_slot(table: i64, ids: &[i64], slot: &str) -> Outcome<Box<SlotValues>> {
    guard(|| {
        let (description, values) = registry()?.with_table("hashtable_slot", table, |table| {
            Ok((table.describe()?, table.read_slot(slot, ids)?))
        })?;
        let width = description.slots.iter().find(|(name, _)| *name == slot).map(|&(_, width)| width);
        let found = values.zip(width).map(|(values, width)| Box::new(SlotValues { values, width }));
        found.ok_or_else(|| {
            let names: Vec<_> = description.slots.iter().map(|(name, _)| name).collect();
            Failure::Runtime(format!(
                "hashtable_slot: table \"{}\" has the slots {names:?}, got \"{slot}\"",
                description.name
            ))
        })
    })
}

pub(crate) fn make_collector() -> Outcome<i64> {
    guard(|| Ok(registry()?.add_collector()))
}

pub(crate) fn collector_release(collector: i64) -> Outcome {
    guard(|| registry()?.remove_collector(collector))
}

/// `tensors` hold a row of `dim` elements for each id. Returns what is to be told of a collector that nobody empties.
pub(crate) fn accept_grad(
    collector: i64,
    table: i64,
    tensors: SharedPtr<KeptTensors>,
    dim: usize,
    padding_idx: &[i64],
) -> Outcome<String> {
    guard(|| {
        let part = TensorPart {
            ids: 0..tensors.ids().len(),
            floats: 0..tensors.gradients().len(),
            first_place: 0,
            stride: dim,
            first_column: 0,
            row_of: Vec::new(),
            padding_idx: padding_idx.first().copied(),
            tensors,
        };
        accept([((collector, table), vec![Box::new(part) as Box<dyn KeptGradients>])])
    })
}

/// `tensors` hold the gradients of the bags of all tables, side by side. Tables that occur several times with one
/// collector were looked up several times by one backward pass.
pub(crate) fn accept_bag_grads(
    collectors: &[i64],
    tables: &[i64],
    offsets: &[i64],
    tensors: SharedPtr<KeptTensors>,
    dims: &[i64],
    padding_idx: &[i64],
) -> Outcome<String> {
    guard(|| {
        check_offsets("accept_bag_grads", "offsets", offsets, tensors.ids().len())?;
        let dims: Vec<usize> = dims.iter().map(|&dim| checked_dim(dim)).collect::<Outcome<_>>()?;
        let mut chunks = BTreeMap::<(i64, i64), Vec<Box<dyn KeptGradients>>>::new();
        let parts = bag_parts(&tensors, offsets, &dims, padding_idx.first().copied());
        for ((&collector, &table), part) in collectors.iter().zip(tables).zip(parts) {
            chunks.entry((collector, table)).or_default().push(Box::new(part));
        }
        // All of them before the first collector gets anything.
        for &(collector, table) in chunks.keys() {
            registry()?.collector("accept_grad", collector)?;
            registry()?.with_table("accept_grad", table, |table| table.check_open("accept_grad"))?;
        }
        accept(chunks)
    })
}

/// What one backward pass gave, by collector and table.
pub(crate) type Passes = ((i64, i64), Vec<Box<dyn KeptGradients>>);

/// Hands what one backward pass gave to collectors; merges what they have where that is worth it.
pub(crate) fn accept(passes: impl IntoIterator<Item = Passes>) -> Outcome<String> {
    const OPERATION: &str = "accept_grad";
    let (registry, mut accepted) = (registry()?, Vec::new());
    for ((collector, handle), parts) in passes {
        let collector = registry.collector(OPERATION, collector)?;
        registry.with_placed(OPERATION, handle, |place, table| collector.accept(place, table, parts))?;
        accepted.push((collector, registry.table(OPERATION, handle)?));
    }
    let lookups = accepted.iter().map(|(collector, placed)| (&**collector, placed.place, &*placed.table));
    GradientCollector::merge_early(&TorchThreads, &lookups.collect::<Vec<_>>());
    let overdue = accepted.iter().find_map(|(collector, placed)| collector.overdue(&placed.place));
    Ok(overdue.map(|overdue| overdue.to_string()).unwrap_or_default())
}

pub(crate) fn apply_grads(collectors: &[i64]) -> Outcome {
    guard(|| {
        let registry = registry()?;
        let found = collectors.iter().map(|&handle| registry.collector("apply_grads", handle));
        let found = found.collect::<Outcome<Vec<_>>>()?;
        let found: Vec<_> = found.iter().map(AsRef::as_ref).collect();
        GradientCollector::apply(&found, |steps| registry.take_steps("apply_grads", steps))
    })
}

pub(crate) fn clear_grads(collector: i64) -> Outcome {
    guard(|| {
        registry()?.collector("clear_grads", collector)?.clear();
        Ok(())
    })
}

/// The handles of the tables that a collector has gradients for, the words of one after those of another; zeros for one
/// that was released.
pub(crate) fn collected_tables(collector: i64) -> Outcome<Box<Ids>> {
    guard(|| {
        let registry = registry()?;
        let tables = registry.collector("collected_tables", collector)?.tables();
        let words = |table| registry.handle_of(table).map_or([0; HANDLE_WORDS], HandleWords::to_words);
        Ok(Box::new(Ids(tables.into_iter().flat_map(words).collect())))
    })
}

pub(crate) fn collected_grads(collector: i64, table: i64) -> Outcome<Box<Merged>> {
    guard(|| {
        let registry = registry()?;
        let collector = registry.collector("collected_grads", collector)?;
        registry.with_placed("collected_grads", table, |place, table| {
            table.check_open("collected_grads")?;
            Ok(Box::new(Merged { gradients: collector.merged(&TorchThreads, &place)?, dim: table.dim() }))
        })
    })
}

/// Returns the number of distinct ids; `distinct` has room for all.
pub(crate) fn unique(ids: &[i64], distinct: &mut [i64], inverse: &mut [i64]) -> Outcome<usize> {
    guard(|| Ok(recstore::unique(&TorchThreads, ids, distinct, inverse)))
}

/// Returns the number of distinct ids; `merged_ids` and `sums` have room for all.
pub(crate) fn merge_gradients(
    ids: &[i64],
    gradients: &[f32],
    dim: usize,
    merged_ids: &mut [i64],
    sums: &mut [f32],
) -> Outcome<usize> {
    guard(|| {
        let chunk = GradientChunk::new(ids, gradients, dim);
        Ok(recstore::merge_gradients_into(&TorchThreads, dim, chunk, merged_ids, sums)?)
    })
}

/// Panics with `message`: how one proves that a panic in Rust reaches Python as an exception.
pub(crate) fn panic_with(message: &str) -> Outcome {
    guard(|| panic!("{message}"))
}

/// Ids whose number only Rust knows.
pub(crate) struct Ids(pub(crate) Vec<i64>);

impl Ids {
    pub(crate) fn ids(&self) -> &[i64] {
        &self.0
    }
}

/// Merged gradients, whose number only Rust knows.
pub(crate) struct Merged {
    gradients: MergedGradients,
    dim: usize,
}

impl Merged {
    pub(crate) fn merged_ids(&self) -> &[i64] {
        &self.gradients.ids
    }

    pub(crate) fn sums(&self) -> &[f32] {
        &self.gradients.sums
    }

    pub(crate) fn dim(&self) -> usize {
        self.dim
    }
}

/// The values of an optimizer slot, `width` a row.
pub(crate) struct SlotValues {
    values: Vec<f32>,
    width: usize,
}

impl SlotValues {
    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }
}

pub(crate) fn checked_dim(dim: i64) -> Outcome<usize> {
    usize::try_from(dim).map_err(|_| Failure::Runtime(format!("dim must be at least 1, got {dim}")))
}
