//! The operators `torch.ops.recstore.*`: what `ops.cpp` calls in Rust, and what Rust calls in libtorch.

mod executor;
mod frozen;
mod guard;
mod handle_words;
mod handles;
mod id_kernels;
mod kept;
mod kernels;
mod large_result;
mod opened;
mod prefetching;
mod publications;
mod rank_kernels;
mod registry;
mod replicas;
mod steps;
mod stores;
mod tables;

use executor::{Task, run_piece};
use guard::{is_index_error, note_refusal};
use id_kernels::{
    bucket_ids, check_ngrams, check_prefix_sizes, cross_ids, hash_strings_32, hash_strings_64, ngram_ids,
    prefix_ids,
};
use kernels::{
    Fetched, Ids, Merged, SlotValues, accept_bag_grads, accept_grad, apply_grads, check_dim, clear_grads,
    collected_grads, collected_tables, collector_release, drop_table, emb_bag, emb_prefetch,
    emb_prefetch_default, emb_prefetch_tables, emb_read, emb_read_default, emb_read_places, emb_update,
    emb_update_default, emb_wait, emb_write, emb_write_default, find_table, handle_words, hashtable_clear,
    hashtable_delete, hashtable_ids, hashtable_lookup, hashtable_release, hashtable_size, hashtable_slot,
    init_embedding_table, make_collector, make_hashtable, merge_gradients, num_prefetches_dropped,
    panic_with, set_learning_rate, table_text, unique,
};
use large_result::{LargeResult, large_result, large_result_bytes};
use rank_kernels::{
    accept_rank_grads, pool_rank_rows, rank_flags, rank_requests, read_for_ranks, spread_rank_grads,
};
use recstore::fork::{
    before as before_fork, in_child as after_fork_in_child, in_parent as after_fork_in_parent,
};

pub use executor::TorchThreads;
pub use ffi::register_ops;
pub use frozen::OpenedFrozen;
pub use guard::Failure;
pub use registry::{Registry, registry};

#[allow(
    clippy::too_many_arguments,
    unsafe_code,
    unreachable_pub,
    reason = "the glue that cxx writes for the declarations below"
)]
#[cxx::bridge(namespace = "recstore")]
mod ffi {
    extern "Rust" {
        type Task<'a>;
        unsafe fn run_piece<'a>(task: &Task<'a>, index: usize);

        fn before_fork();
        fn after_fork_in_parent();
        fn after_fork_in_child();

        fn note_refusal(operation: &str, message: &str);
        fn is_index_error(message: &str) -> bool;

        fn handle_words() -> usize;
        fn find_table(operation: &str, words: &[i64]) -> Result<i64>;
        fn make_hashtable(name: &str, dim: i64, config: &str) -> Result<Box<Ids>>;
        fn init_embedding_table(name: &str, num_embeddings: i64, dim: i64, config: &str) -> Result<bool>;
        fn hashtable_release(words: &[i64]) -> Result<()>;
        fn drop_table(name: &str) -> Result<()>;
        fn set_learning_rate(table: i64, lr: f64) -> Result<()>;
        fn table_text(operation: &str, words: &[i64]) -> Result<String>;
        fn check_dim(operation: &str, what: &str, words: &[i64], dim: usize) -> Result<i64>;

        fn emb_read(table: i64, ids: &[i64], rows: &mut [f32]) -> Result<()>;
        fn emb_read_places(table: i64, ids: &[i64], rows: &mut [f32], places: &mut [u32]) -> Result<()>;
        fn emb_read_default(dim: usize, ids: &[i64], rows: &mut [f32]) -> Result<()>;
        fn emb_write(table: i64, ids: &[i64], rows: &[f32]) -> Result<()>;
        fn emb_write_default(dim: usize, ids: &[i64], rows: &[f32]) -> Result<()>;
        fn emb_update(table: i64, ids: &[i64], gradients: &[f32], dim: usize) -> Result<()>;
        fn emb_update_default(dim: usize, ids: &[i64], gradients: &[f32]) -> Result<()>;
        fn emb_bag(
            tables: &[i64],
            ids: &[i64],
            offsets: &[i64],
            mode: i64,
            per_sample_weights: &[f32],
            padding_idx: &[i64],
            pooled: &mut [f32],
            max_positions: &mut [i64],
            places: &mut [u32],
        ) -> Result<()>;

        fn emb_prefetch(table: i64, ids: &[i64]) -> Result<i64>;
        fn emb_prefetch_default(dim: usize, ids: &[i64]) -> Result<i64>;
        fn emb_prefetch_tables(tables: &[i64], ids: &[i64], splits: &[i64]) -> Result<i64>;
        fn emb_wait(prefetch: i64, dims: &[i64]) -> Result<Box<Fetched>>;
        fn num_prefetches_dropped() -> Result<u64>;

        type Fetched;
        fn num_tables(self: &Fetched) -> usize;
        fn table_dim(self: &Fetched, table: usize) -> usize;
        fn rows(self: &Fetched, table: usize) -> &[f32];

        fn hashtable_lookup(
            table: i64,
            ids: &[i64],
            insert: bool,
            indices: &mut [i64],
            rows: &mut [f32],
        ) -> Result<()>;
        fn hashtable_delete(table: i64, ids: &[i64]) -> Result<()>;
        fn hashtable_clear(table: i64) -> Result<()>;
        fn hashtable_ids(table: i64) -> Result<Box<Ids>>;
        fn hashtable_size(table: i64) -> Result<i64>;
        fn hashtable_slot(table: i64, ids: &[i64], slot: &str) -> Result<Box<SlotValues>>;

        fn make_collector() -> Result<i64>;
        fn collector_release(collector: i64) -> Result<()>;
        fn accept_grad(
            collector: i64,
            table: i64,
            tensors: SharedPtr<KeptTensors>,
            dim: usize,
            padding_idx: &[i64],
        ) -> Result<String>;
        fn accept_bag_grads(
            collectors: &[i64],
            tables: &[i64],
            offsets: &[i64],
            tensors: SharedPtr<KeptTensors>,
            dims: &[i64],
            padding_idx: &[i64],
        ) -> Result<String>;
        fn apply_grads(collectors: &[i64]) -> Result<()>;
        fn clear_grads(collector: i64) -> Result<()>;
        fn collected_tables(collector: i64) -> Result<Box<Ids>>;
        fn collected_grads(collector: i64, table: i64) -> Result<Box<Merged>>;

        fn unique(ids: &[i64], distinct: &mut [i64], inverse: &mut [i64]) -> Result<usize>;
        fn merge_gradients(
            ids: &[i64],
            gradients: &[f32],
            dim: usize,
            merged_ids: &mut [i64],
            sums: &mut [f32],
        ) -> Result<usize>;

        fn hash_strings_32(characters: &[u8], offsets: &[i32], seed: i64, ids: &mut [i64]) -> Result<()>;
        fn hash_strings_64(characters: &[u8], offsets: &[i64], seed: i64, ids: &mut [i64]) -> Result<()>;
        fn cross_ids(columns: &IdColumns, seed: i64, crossed: &mut [i64]) -> Result<()>;
        fn check_ngrams(n: i64, tables: i64, vocab: i64) -> Result<()>;
        fn ngram_ids(
            tokens: &[i64],
            length: usize,
            n: i64,
            tables: i64,
            vocab: i64,
            seed: i64,
            ids: &mut [i64],
        ) -> Result<()>;
        fn check_prefix_sizes(sizes: &[i64]) -> Result<()>;
        fn prefix_ids(codes: &[i64], sizes: &[i64], ids: &mut [i64]) -> Result<()>;
        fn bucket_ids(ids: &[i64], buckets: i64, seed: i64, bucketed: &mut [i64]) -> Result<()>;

        fn rank_flags() -> usize;
        fn rank_requests(
            ids: &[i64],
            splits: &[i64],
            ranks: i64,
            distinct: &mut [i64],
            places: &mut [i64],
        ) -> Result<Box<Ids>>;
        fn read_for_ranks(
            tables: &[i64],
            ids: &[i64],
            counts: &[i64],
            dims: &[i64],
            rows: &mut [f32],
            places: &mut [u32],
        ) -> Result<()>;
        fn pool_rank_rows(
            counts: &[i64],
            dims: &[i64],
            tables: &[i64],
            places: &[i64],
            offsets: &[i64],
            rows: &[f32],
            pooled: &mut [f32],
        ) -> Result<()>;
        fn spread_rank_grads(
            counts: &[i64],
            dims: &[i64],
            tables: &[i64],
            places: &[i64],
            offsets: &[i64],
            gradients: &[f32],
            rows: &mut [f32],
        ) -> Result<()>;
        fn accept_rank_grads(
            collectors: &[i64],
            tables: &[i64],
            counts: &[i64],
            dims: &[i64],
            padded: &[i64],
            padding_ids: &[i64],
            tensors: SharedPtr<KeptTensors>,
        ) -> Result<String>;

        fn panic_with(message: &str) -> Result<()>;

        type Ids;
        fn ids(self: &Ids) -> &[i64];

        type Merged;
        fn merged_ids(self: &Merged) -> &[i64];
        fn sums(self: &Merged) -> &[f32];
        fn dim(self: &Merged) -> usize;

        type LargeResult;
        fn large_result_bytes() -> usize;
        fn large_result(bytes: usize) -> Box<LargeResult>;
        fn start(self: &mut LargeResult) -> *mut u8;

        type SlotValues;
        fn values(self: &SlotValues) -> &[f32];
        fn width(self: &SlotValues) -> usize;
    }

    // SAFETY:
    // 1. `parallel_for` calls `run_piece` only before it returns, so that `task` outlives every use.
    // 2. `register_ops` touches only libtorch's registry and may be called from any thread.
    // 3. A `KeptTensors` and an `IdColumns` give slices of tensors that live as long as they do.
    unsafe extern "C++" {
        include!("recstore-bridge/ops.h");
        include!("recstore-bridge/id_columns.h");
        include!("recstore-bridge/kept_tensors.h");

        /// Ids and gradients of a backward pass, and what belongs to them.
        type KeptTensors;
        fn ids(self: &KeptTensors) -> &[i64];
        fn gradients(self: &KeptTensors) -> &[f32];
        fn weights(self: &KeptTensors) -> &[f32];
        fn places(self: &KeptTensors) -> &[u32];
        fn were_changed(self: &KeptTensors) -> bool;

        /// Columns of ids, as many in each.
        type IdColumns;
        fn count(self: &IdColumns) -> usize;
        fn column(self: &IdColumns, number: usize) -> &[i64];

        /// How many threads libtorch's loops run on.
        fn num_threads() -> usize;

        /// Runs every piece below `count` on libtorch's threads and returns when all have run.
        unsafe fn parallel_for<'a>(count: usize, task: &Task<'a>) -> Result<()>;

        /// Defines every operator and its kernels, and sets up the fork handlers. Call it once.
        fn register_ops() -> Result<()>;
    }
}
