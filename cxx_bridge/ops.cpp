// The operators of torch.ops.recstore: for each its checks and its kernel, and at the end every schema.
//
// Only libtorch's stable ABI is used. A kernel checks its tensors, hands slices to Rust and wraps what comes back.

#include "recstore-bridge/ops.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "recstore-bridge/arguments.h"
#include "recstore-bridge/id_ops.h"
#include "recstore-bridge/kept_tensors.h"
#include "recstore-bridge/new_tensor.h"
#include "recstore-bridge/rank_ops.h"
#include "recstore-bridge/src/lib.rs.h"
#include "recstore-bridge/tensor_check.h"

namespace recstore {

void parallel_for(std::size_t count, const Task& task) {
  torch::stable::parallel_for(0, static_cast<int64_t>(count), 1, [&task](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      run_piece(task, static_cast<std::size_t>(index));
    }
  });
}

std::size_t num_threads() {
  return torch::stable::get_num_threads();
}

namespace {

Tensor make_hashtable_op(const std::string& name, int64_t dim, const std::string& config) {
  return copied_ids(call([&] { return make_hashtable(text(name), dim, text(config)); })->ids());
}

bool init_embedding_table_op(
    const std::string& name, int64_t num_embeddings, int64_t dim, const std::string& config) {
  return call([&] { return init_embedding_table(text(name), num_embeddings, dim, text(config)); });
}

void hashtable_release_op(const Tensor& table) {
  call([&] { hashtable_release(table_words("hashtable_release", table)); });
}

void drop_table_op(const std::string& name) {
  call([&] { drop_table(text(name)); });
}

void set_learning_rate_op(const Tensor& table, double lr) {
  call([&] { set_learning_rate(table_of("set_learning_rate", table), lr); });
}

void panic_op(const std::string& message) {
  call([&] { panic_with(text(message)); });
}

// Rows.

Tensor emb_read_op(const Tensor& table, const Tensor& ids, int64_t dim) {
  const int64_t handle = table_of_dim("emb_read", "rows", table, dim);
  const Tensor host = host_ids("emb_read", ids);
  const Tensor rows = new_floats(row_shape(ids, dim));
  call([&] { emb_read(handle, ids_slice(host), float_slice_mut(rows)); });
  return to_device_of(ids, rows);
}

std::tuple<Tensor, Tensor> emb_read_places_op(const Tensor& table, const Tensor& ids, int64_t dim) {
  const int64_t handle = table_of_dim("emb_read", "rows", table, dim);
  const Tensor host = host_ids("emb_read", ids);
  const Tensor rows = new_floats(row_shape(ids, dim));
  const Tensor places = new_words(ids.numel() + kPlacesTag);
  call([&] { emb_read_places(handle, ids_slice(host), float_slice_mut(rows), words_slice_mut(places)); });
  return {to_device_of(ids, rows), places};
}

Tensor emb_read_default_op(const Tensor& ids, int64_t dim) {
  const std::size_t width = checked_dim("emb_read", dim);
  const Tensor host = host_ids("emb_read", ids);
  const Tensor rows = new_floats(row_shape(ids, dim));
  call([&] { emb_read_default(width, ids_slice(host), float_slice_mut(rows)); });
  return to_device_of(ids, rows);
}

void emb_write_op(const Tensor& table, const Tensor& ids, const Tensor& rows) {
  const int64_t handle = table_of_rows("emb_write", "rows", "rows", table, ids, rows);
  const Tensor host = host_ids("emb_write", ids);
  const Tensor values = host_floats("emb_write", "rows", rows);
  call([&] { emb_write(handle, ids_slice(host), float_slice(values)); });
}

void emb_write_default_op(const Tensor& ids, const Tensor& rows) {
  const std::size_t dim = default_dim("emb_write", "rows", ids, rows);
  const Tensor host = host_ids("emb_write", ids);
  const Tensor values = host_floats("emb_write", "rows", rows);
  call([&] { emb_write_default(dim, ids_slice(host), float_slice(values)); });
}

void emb_update_op(const Tensor& table, const Tensor& ids, const Tensor& grads) {
  const int64_t handle = table_of_rows("emb_update", "gradients", "gradient rows", table, ids, grads);
  const Tensor host = host_ids("emb_update", ids);
  const Tensor values = host_floats("emb_update", "gradients", grads);
  call([&] {
    emb_update(handle, ids_slice(host), float_slice(values), static_cast<std::size_t>(grads.size(-1)));
  });
}

void emb_update_default_op(const Tensor& ids, const Tensor& grads) {
  const std::size_t dim = default_dim("emb_update", "gradients", ids, grads);
  const Tensor host = host_ids("emb_update", ids);
  const Tensor values = host_floats("emb_update", "gradients", grads);
  call([&] { emb_update_default(dim, ids_slice(host), float_slice(values)); });
}

// Bags.

constexpr int64_t kMax = 2;

// The inputs of a bag operator, on the host.
struct Bags {
  Tensor ids;
  Tensor offsets;
  std::optional<Tensor> weights;

  Bags(const Tensor& ids_in, const Tensor& offsets_in, const std::optional<Tensor>& weights_in)
      : ids(host_ids("emb_bag", ids_in)), offsets(host_ids("emb_bag", offsets_in, "offsets")) {
    check_flat("emb_bag", "ids", ids);
    check_flat("emb_bag", "offsets", offsets);
    if (offsets.numel() == 0) {
      refuse("emb_bag: offsets must hold at least the end of the last bag, got none");
    }
    if (weights_in) {
      if (weights_in->numel() != ids.numel()) {
        refuse("emb_bag: expected ", ids.numel(), " per_sample_weights, one an id, got ", weights_in->numel());
      }
      weights = host_floats("emb_bag", "per_sample_weights", *weights_in);
    }
  }

  rust::Slice<const float> weight_slice() const {
    return weights ? float_slice(*weights) : rust::Slice<const float>();
  }
};

// The bags of several tables, and where what is pooled of them goes.
struct PooledBags {
  Bags bags;
  std::vector<int64_t> handles;
  Tensor pooled;
  Tensor max_positions;

  PooledBags(
      const std::vector<Tensor>& tables,
      const Tensor& ids,
      const Tensor& offsets,
      const std::vector<int64_t>& dims,
      int64_t mode,
      const std::optional<Tensor>& weights)
      : bags(ids, offsets, weights), pooled(new_floats({0})), max_positions(new_ids({0})) {
    const int64_t features = static_cast<int64_t>(tables.size());
    const int64_t count = bags.offsets.numel() - 1;
    if (features == 0 || dims.size() != tables.size() || count % features != 0) {
      refuse("emb_bag: ", features, " tables need as many dims and as many bags each, got ", dims.size(), " dims and ",
             count, " bags");
    }
    int64_t total = 0;
    for (int64_t feature = 0; feature < features; ++feature) {
      handles.push_back(table_of_dim("emb_bag", "pooled rows", tables[feature], dims[feature]));
      total += dims[feature];
    }
    pooled = new_floats({count / features, total});
    if (mode == kMax) {
      max_positions = new_ids({count / features, total});
    }
  }

  void pool(int64_t mode, const std::optional<int64_t>& padding_idx, rust::Slice<uint32_t> places) const {
    call([&] {
      emb_bag({handles.data(), handles.size()}, ids_slice(bags.ids), ids_slice(bags.offsets), mode,
              bags.weight_slice(), optional_id(padding_idx), float_slice_mut(pooled), ids_slice_mut(max_positions),
              places);
    });
  }
};

std::tuple<Tensor, Tensor> emb_bag_op(
    const Tensor& table,
    const Tensor& ids,
    const Tensor& offsets,
    int64_t dim,
    int64_t mode,
    const std::optional<Tensor>& per_sample_weights,
    const std::optional<int64_t>& padding_idx) {
  const PooledBags found({table}, ids, offsets, {dim}, mode, per_sample_weights);
  found.pool(mode, padding_idx, {});
  return {to_device_of(ids, found.pooled), to_device_of(ids, found.max_positions)};
}

std::tuple<Tensor, Tensor> emb_bag_tables_op(
    const std::vector<Tensor>& tables,
    const Tensor& ids,
    const Tensor& offsets,
    const std::vector<int64_t>& dims,
    int64_t mode,
    const std::optional<Tensor>& per_sample_weights) {
  const PooledBags found(tables, ids, offsets, dims, mode, per_sample_weights);
  found.pool(mode, std::nullopt, {});
  return {to_device_of(ids, found.pooled), to_device_of(ids, found.max_positions)};
}

std::tuple<Tensor, Tensor, Tensor> emb_bag_places_op(
    const std::vector<Tensor>& tables,
    const Tensor& ids,
    const Tensor& offsets,
    const std::vector<int64_t>& dims,
    int64_t mode,
    const std::optional<Tensor>& per_sample_weights,
    const std::optional<int64_t>& padding_idx) {
  const PooledBags found(tables, ids, offsets, dims, mode, per_sample_weights);
  const Tensor places = new_words(ids.numel() + kPlacesTag * static_cast<int64_t>(tables.size()));
  found.pool(mode, padding_idx, words_slice_mut(places));
  return {to_device_of(ids, found.pooled), to_device_of(ids, found.max_positions), places};
}

// Prefetch.

// Tells of prefetches that were dropped since the last call.
void warn_of_dropped_prefetches() {
  static std::atomic<uint64_t> reported = 0;
  const uint64_t dropped = call([] { return num_prefetches_dropped(); });
  const uint64_t before = reported.exchange(dropped);
  if (dropped > before) {
    std::cerr << "recstore_ops: warning: " << dropped - before
              << " prefetches were dropped, oldest first, because nobody consumed them with emb_wait_result\n";
  }
}

int64_t emb_prefetch_op(const Tensor& table, const Tensor& ids) {
  const int64_t handle = table_of("emb_prefetch", table);
  const Tensor host = host_ids("emb_prefetch", ids);
  const int64_t prefetch = call([&] { return emb_prefetch(handle, ids_slice(host)); });
  warn_of_dropped_prefetches();
  return prefetch;
}

int64_t emb_prefetch_default_op(const Tensor& ids, int64_t dim) {
  const std::size_t width = checked_dim("emb_prefetch", dim);
  const Tensor host = host_ids("emb_prefetch", ids);
  const int64_t prefetch = call([&] { return emb_prefetch_default(width, ids_slice(host)); });
  warn_of_dropped_prefetches();
  return prefetch;
}

int64_t emb_prefetch_tables_op(const std::vector<Tensor>& tables, const Tensor& ids, const Tensor& splits) {
  check_flat("emb_prefetch", "ids", ids);
  check_flat("emb_prefetch", "splits", splits);
  if (splits.numel() != static_cast<int64_t>(tables.size()) + 1) {
    refuse("emb_prefetch: ", tables.size(), " tables need ", tables.size() + 1, " splits, got ", splits.numel());
  }
  std::vector<int64_t> handles;
  for (const Tensor& table : tables) {
    handles.push_back(table_of("emb_prefetch", table));
  }
  const Tensor host = host_ids("emb_prefetch", ids);
  const Tensor host_splits = host_ids("emb_prefetch", splits, "splits");
  const int64_t prefetch = call([&] {
    return emb_prefetch_tables({handles.data(), handles.size()}, ids_slice(host), ids_slice(host_splits));
  });
  warn_of_dropped_prefetches();
  return prefetch;
}

Tensor fetched_rows(const Fetched& fetched, std::size_t table) {
  const rust::Slice<const float> rows = fetched.rows(table);
  const int64_t dim = static_cast<int64_t>(fetched.table_dim(table));
  return copied(rows, new_floats({static_cast<int64_t>(rows.size()) / dim, dim}));
}

Tensor emb_wait_result_op(int64_t handle, int64_t dim) {
  checked_dim("emb_wait_result", dim);
  const rust::Box<Fetched> fetched = call([&] { return emb_wait(handle, {&dim, 1}); });
  return fetched_rows(*fetched, 0);
}

std::vector<Tensor> emb_wait_tables_op(int64_t handle) {
  const rust::Box<Fetched> fetched = call([&] { return emb_wait(handle, {}); });
  std::vector<Tensor> rows;
  for (std::size_t table = 0; table < fetched->num_tables(); ++table) {
    rows.push_back(fetched_rows(*fetched, table));
  }
  return rows;
}

// The hash table's own view.

std::tuple<Tensor, Tensor> hashtable_lookup_op(const Tensor& table, const Tensor& ids, int64_t dim, bool insert) {
  const int64_t handle = table_of_dim("hashtable_lookup", "rows", table, dim);
  const Tensor host = host_ids("hashtable_lookup", ids);
  const Tensor indices = new_ids(shape_of(ids));
  const Tensor rows = new_floats(row_shape(ids, dim));
  call([&] { hashtable_lookup(handle, ids_slice(host), insert, ids_slice_mut(indices), float_slice_mut(rows)); });
  return {to_device_of(ids, indices), to_device_of(ids, rows)};
}

void hashtable_delete_op(const Tensor& table, const Tensor& ids) {
  const int64_t handle = table_of("hashtable_delete", table);
  const Tensor host = host_ids("hashtable_delete", ids);
  call([&] { hashtable_delete(handle, ids_slice(host)); });
}

void hashtable_clear_op(const Tensor& table) {
  call([&] { hashtable_clear(table_of("hashtable_clear", table)); });
}

Tensor hashtable_ids_op(const Tensor& table) {
  const rust::Box<Ids> found = call([&] { return hashtable_ids(table_of("hashtable_ids", table)); });
  return copied_ids(found->ids());
}

int64_t hashtable_size_op(const Tensor& table) {
  return call([&] { return hashtable_size(table_of("hashtable_size", table)); });
}

Tensor hashtable_slot_op(const Tensor& table, const Tensor& ids, const std::string& name) {
  const int64_t handle = table_of("hashtable_slot", table);
  const Tensor host = host_ids("hashtable_slot", ids);
  const rust::Box<SlotValues> found = call([&] { return hashtable_slot(handle, ids_slice(host), text(name)); });
  const Tensor values = new_floats(row_shape(ids, static_cast<int64_t>(found->width())));
  return to_device_of(ids, copied(found->values(), values));
}

// Gradients.

Tensor make_collector_op() {
  const Tensor collector = new_ids({});
  ids_slice_mut(collector)[0] = call([] { return make_collector(); });
  return collector;
}

void collector_release_op(const Tensor& collector) {
  call([&] { collector_release(collector_of("collector_release", collector)); });
}

void accept_grad_op(
    const Tensor& collector,
    const Tensor& table,
    const Tensor& ids,
    const Tensor& grads,
    const std::optional<int64_t>& padding_idx,
    const std::optional<Tensor>& places,
    bool keep) {
  const int64_t into = collector_of("accept_grad", collector);
  const int64_t handle = table_of_rows("accept_grad", "gradients", "gradient rows", table, ids, grads);
  const auto tensors = std::make_shared<KeptTensors>(
      host_ids("accept_grad", ids), host_floats("accept_grad", "gradients", grads), std::nullopt,
      host_places("accept_grad", places), keep);
  const auto dim = static_cast<std::size_t>(grads.size(-1));
  warn(call([&] { return accept_grad(into, handle, tensors, dim, optional_id(padding_idx)); }));
}

void accept_bag_grads_op(
    const std::vector<Tensor>& collectors,
    const std::vector<Tensor>& tables,
    const Tensor& ids,
    const Tensor& offsets,
    const Tensor& grads,
    const std::vector<int64_t>& dims,
    const std::optional<Tensor>& per_sample_weights,
    const std::optional<int64_t>& padding_idx,
    const std::optional<Tensor>& places,
    bool keep) {
  constexpr const char* op = "accept_bag_grads";
  const Bags bags(ids, offsets, per_sample_weights);
  const int64_t features = static_cast<int64_t>(tables.size());
  int64_t total = 0;
  std::vector<int64_t> into;
  std::vector<int64_t> handles;
  if (features == 0 || dims.size() != tables.size() || collectors.size() != tables.size() ||
      (bags.offsets.numel() - 1) % features != 0) {
    refuse(op, ": ", features, " tables need as many collectors, dims and bags each, got ", collectors.size(),
           " collectors, ", dims.size(), " dims and ", bags.offsets.numel() - 1, " bags");
  }
  for (int64_t feature = 0; feature < features; ++feature) {
    into.push_back(collector_of(op, collectors[feature]));
    handles.push_back(table_of_dim(op, "gradient rows", tables[feature], dims[feature]));
    total += dims[feature];
  }
  const int64_t count = (bags.offsets.numel() - 1) / features;
  if (grads.dim() != 2 || grads.size(0) != count || grads.size(1) != total) {
    refuse(op, ": ", count, " bags of ", features, " tables of dims together ", total,
           " need gradients of that shape, got ", shape_text(grads));
  }
  const auto tensors = std::make_shared<KeptTensors>(
      bags.ids, host_floats(op, "gradients", grads), bags.weights, host_places(op, places), keep);
  warn(call([&] {
    return accept_bag_grads({into.data(), into.size()}, {handles.data(), handles.size()}, ids_slice(bags.offsets),
                            tensors, {dims.data(), dims.size()}, optional_id(padding_idx));
  }));
}

void apply_grads_op(const std::vector<Tensor>& collectors) {
  std::vector<int64_t> handles;
  for (const Tensor& collector : collectors) {
    handles.push_back(collector_of("apply_grads", collector));
  }
  call([&] { apply_grads({handles.data(), handles.size()}); });
}

void clear_grads_op(const Tensor& collector) {
  call([&] { clear_grads(collector_of("clear_grads", collector)); });
}

Tensor collected_tables_op(const Tensor& collector) {
  const rust::Box<Ids> found = call([&] { return collected_tables(collector_of("collected_tables", collector)); });
  const int64_t width = static_cast<int64_t>(handle_words());
  return copied(found->ids(), new_ids({static_cast<int64_t>(found->ids().size()) / width, width}));
}

std::tuple<Tensor, Tensor> merged_tensors(const Merged& merged) {
  const Tensor ids = copied_ids(merged.merged_ids());
  const Tensor sums = new_floats({ids.numel(), static_cast<int64_t>(merged.dim())});
  return {ids, copied(merged.sums(), sums)};
}

std::tuple<Tensor, Tensor> collected_grads_op(const Tensor& collector, const Tensor& table) {
  const rust::Box<Merged> merged = call([&] {
    return collected_grads(collector_of("collected_grads", collector), table_of("collected_grads", table));
  });
  return merged_tensors(*merged);
}

std::tuple<Tensor, Tensor> unique_op(const Tensor& ids) {
  const Tensor host = host_ids("unique", ids);
  const Tensor inverse = new_ids(shape_of(ids));
  // Room for every id: what is not used of it is never touched.
  const Tensor distinct = new_ids({host.numel()});
  const std::size_t count =
      call([&] { return unique(ids_slice(host), ids_slice_mut(distinct), ids_slice_mut(inverse)); });
  return {to_device_of(ids, first_rows(distinct, count)), to_device_of(ids, inverse)};
}

std::tuple<Tensor, Tensor> merge_gradients_op(const Tensor& ids, const Tensor& grads) {
  check_flat("merge_gradients", "ids", ids);
  const auto name = [] { return "the merge"; };
  const std::size_t dim = checked_dim("merge_gradients", row_dim("merge_gradients", "gradients", name, ids, grads));
  const Tensor host = host_ids("merge_gradients", ids);
  const Tensor values = host_floats("merge_gradients", "gradients", grads);
  const Tensor distinct = new_ids({host.numel()});
  const Tensor sums = new_floats({host.numel(), static_cast<int64_t>(dim)});
  const std::size_t count = call([&] {
    return merge_gradients(ids_slice(host), float_slice(values), dim, ids_slice_mut(distinct), float_slice_mut(sums));
  });
  return {to_device_of(ids, first_rows(distinct, count)), to_device_of(ids, first_rows(sums, count))};
}

// libtorch's own macro for this runs from a static initializer, where an error ends the interpreter.
using Library = torch::stable::detail::StableLibrary;

struct Operator {
  const char* schema;
  void (*kernel)(StableIValue*, uint64_t, uint64_t);
};

// Every operator: its schema, and the kernel above.
const Operator OPERATORS[] = {
    {"make_hashtable(str name, int dim, str config=\"\") -> Tensor", TORCH_BOX(&make_hashtable_op)},
    {"init_embedding_table(str name, int num_embeddings, int dim, str config=\"\") -> bool",
     TORCH_BOX(&init_embedding_table_op)},
    {"hashtable_release(Tensor table) -> ()", TORCH_BOX(&hashtable_release_op)},
    {"drop_table(str name) -> ()", TORCH_BOX(&drop_table_op)},
    {"set_learning_rate(Tensor table, float lr) -> ()", TORCH_BOX(&set_learning_rate_op)},
    {"emb_read(Tensor ids, int dim) -> Tensor", TORCH_BOX(&emb_read_default_op)},
    {"emb_read.table(Tensor table, Tensor ids, int dim) -> Tensor", TORCH_BOX(&emb_read_op)},
    {"emb_read.places(Tensor table, Tensor ids, int dim) -> (Tensor rows, Tensor places)",
     TORCH_BOX(&emb_read_places_op)},
    {"emb_write(Tensor ids, Tensor rows) -> ()", TORCH_BOX(&emb_write_default_op)},
    {"emb_write.table(Tensor table, Tensor ids, Tensor rows) -> ()", TORCH_BOX(&emb_write_op)},
    {"emb_update(Tensor ids, Tensor grads) -> ()", TORCH_BOX(&emb_update_default_op)},
    {"emb_update.table(Tensor table, Tensor ids, Tensor grads) -> ()", TORCH_BOX(&emb_update_op)},
    {"emb_bag(Tensor table, Tensor ids, Tensor offsets, int dim, int mode, Tensor? per_sample_weights=None, int? padding_idx=None) -> (Tensor pooled, Tensor max_positions)",
     TORCH_BOX(&emb_bag_op)},
    {"emb_bag.tables(Tensor[] tables, Tensor ids, Tensor offsets, int[] dims, int mode, Tensor? per_sample_weights=None) -> (Tensor pooled, Tensor max_positions)",
     TORCH_BOX(&emb_bag_tables_op)},
    {"emb_bag.places(Tensor[] tables, Tensor ids, Tensor offsets, int[] dims, int mode, Tensor? per_sample_weights=None, int? padding_idx=None) -> (Tensor pooled, Tensor max_positions, Tensor places)",
     TORCH_BOX(&emb_bag_places_op)},
    // Before the overload without a table, which would take ids of one element for its dim.
    {"emb_prefetch.table(Tensor table, Tensor ids) -> int", TORCH_BOX(&emb_prefetch_op)},
    {"emb_prefetch(Tensor ids, int dim) -> int", TORCH_BOX(&emb_prefetch_default_op)},
    {"emb_prefetch.tables(Tensor[] tables, Tensor ids, Tensor splits) -> int", TORCH_BOX(&emb_prefetch_tables_op)},
    {"emb_wait_result(int handle, int dim) -> Tensor", TORCH_BOX(&emb_wait_result_op)},
    {"emb_wait_tables(int handle) -> Tensor[]", TORCH_BOX(&emb_wait_tables_op)},
    {"hashtable_lookup(Tensor table, Tensor ids, int dim, bool insert) -> (Tensor index, Tensor rows)",
     TORCH_BOX(&hashtable_lookup_op)},
    {"hashtable_delete(Tensor table, Tensor ids) -> ()", TORCH_BOX(&hashtable_delete_op)},
    {"hashtable_clear(Tensor table) -> ()", TORCH_BOX(&hashtable_clear_op)},
    {"hashtable_ids(Tensor table) -> Tensor", TORCH_BOX(&hashtable_ids_op)},
    {"hashtable_size(Tensor table) -> int", TORCH_BOX(&hashtable_size_op)},
    {"hashtable_slot(Tensor table, Tensor ids, str name) -> Tensor", TORCH_BOX(&hashtable_slot_op)},
    {"make_collector() -> Tensor", TORCH_BOX(&make_collector_op)},
    {"collector_release(Tensor collector) -> ()", TORCH_BOX(&collector_release_op)},
    {"accept_grad(Tensor collector, Tensor table, Tensor ids, Tensor grads, int? padding_idx=None, Tensor? places=None, bool keep=False) -> ()",
     TORCH_BOX(&accept_grad_op)},
    {"accept_bag_grads(Tensor[] collectors, Tensor[] tables, Tensor ids, Tensor offsets, Tensor grads, int[] dims, Tensor? per_sample_weights=None, int? padding_idx=None, Tensor? places=None, bool keep=False) -> ()",
     TORCH_BOX(&accept_bag_grads_op)},
    {"apply_grads(Tensor[] collectors) -> ()", TORCH_BOX(&apply_grads_op)},
    {"clear_grads(Tensor collector) -> ()", TORCH_BOX(&clear_grads_op)},
    {"collected_tables(Tensor collector) -> Tensor", TORCH_BOX(&collected_tables_op)},
    {"collected_grads(Tensor collector, Tensor table) -> (Tensor ids, Tensor grads)", TORCH_BOX(&collected_grads_op)},
    {"unique(Tensor ids) -> (Tensor unique, Tensor inverse)", TORCH_BOX(&unique_op)},
    {"merge_gradients(Tensor ids, Tensor grads) -> (Tensor ids, Tensor sums)", TORCH_BOX(&merge_gradients_op)},
    {"rank_requests(Tensor ids, int[] splits, int ranks) -> (Tensor ids, Tensor counts, Tensor places)",
     TORCH_BOX(&rank_requests_op)},
    {"emb_read.ranks(Tensor[] tables, Tensor ids, int[] counts, int[] dims) -> (Tensor rows, Tensor places)",
     TORCH_BOX(&emb_read_ranks_op)},
    {"pool_rank_rows(Tensor rows, int[] counts, int[] dims, int[] tables, Tensor places, Tensor offsets) -> Tensor",
     TORCH_BOX(&pool_rank_rows_op)},
    {"spread_rank_grads(Tensor grads, int[] counts, int[] dims, int[] tables, Tensor places, Tensor offsets) -> Tensor",
     TORCH_BOX(&spread_rank_grads_op)},
    {"accept_rank_grads(Tensor[] collectors, Tensor[] tables, Tensor ids, int[] counts, Tensor grads, int[] dims, int[] padded, int[] padding_ids, Tensor? places=None) -> ()",
     TORCH_BOX(&accept_rank_grads_op)},
    {"hash_strings(Tensor characters, Tensor offsets, int seed=0) -> Tensor", TORCH_BOX(&hash_strings_op)},
    {"cross_ids(Tensor[] ids, int seed=0) -> Tensor", TORCH_BOX(&cross_ids_op)},
    {"ngram_ids(Tensor tokens, int n, int tables, int vocab, int seed=0) -> Tensor", TORCH_BOX(&ngram_ids_op)},
    {"prefix_ids(Tensor codes, int[] sizes) -> Tensor", TORCH_BOX(&prefix_ids_op)},
    {"bucket_ids(Tensor ids, int buckets, int seed=0) -> Tensor", TORCH_BOX(&bucket_ids_op)},
    {"_panic(str message) -> ()", TORCH_BOX(&panic_op)},
};

void define(Library& library) {
  for (const Operator& op : OPERATORS) {
    library.def(op.schema);
  }
}

void implement(Library& library) {
  for (const Operator& op : OPERATORS) {
    const std::string schema = op.schema;
    library.impl(schema.substr(0, schema.find('(')).c_str(), op.kernel);
  }
}

}  // namespace

void note(const std::string& operation, const std::string& message) {
  note_refusal(text(operation), text(message));
}

void register_ops() {
  auto schemas = std::make_unique<Library>(Library::Kind::DEF, "recstore", nullptr, __FILE__, __LINE__);
  define(*schemas);
  // The kernels take tensors of any device and stage them on the host themselves.
  auto kernels = std::make_unique<Library>(
      Library::Kind::IMPL, "recstore", "CompositeExplicitAutograd", __FILE__, __LINE__);
  implement(*kernels);
  if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0) {
    refuse("recstore: pthread_atfork failed");
  }
  // Never destroyed: at exit libtorch's registry may be gone before us.
  schemas.release();
  kernels.release();
}

}  // namespace recstore
