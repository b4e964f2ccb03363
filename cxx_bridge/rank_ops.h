// The operators of what ranks exchange, for tables that are sharded over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "recstore-bridge/arguments.h"
#include "recstore-bridge/kept_tensors.h"
#include "recstore-bridge/new_tensor.h"
#include "recstore-bridge/src/lib.rs.h"
#include "recstore-bridge/tensor_check.h"

namespace recstore {

// Rows and gradients that ranks exchange. The counts of ids are those of the first rank's tables first.

// The elements of the rows of all ranks and tables, flags included.
inline int64_t rank_elements(const char* op, const std::vector<int64_t>& counts, const std::vector<int64_t>& dims) {
  if (dims.empty() || counts.size() % dims.size() != 0) {
    refuse(op, ": ", dims.size(), " tables need a count each for every rank, got ", counts.size());
  }
  int64_t elements = static_cast<int64_t>(rank_flags() * (counts.size() / dims.size()));
  for (std::size_t number = 0; number < counts.size(); ++number) {
    elements += counts[number] * static_cast<int64_t>(checked_dim(op, dims[number % dims.size()]));
  }
  return elements;
}

inline std::vector<int64_t> tables_of_dims(
    const char* op, const std::vector<Tensor>& tables, const std::vector<int64_t>& dims) {
  if (tables.size() != dims.size()) {
    refuse(op, ": ", tables.size(), " tables need as many dims, got ", dims.size());
  }
  std::vector<int64_t> numbers;
  for (std::size_t table = 0; table < tables.size(); ++table) {
    numbers.push_back(table_of_dim(op, "rows", tables[table], dims[table]));
  }
  return numbers;
}

inline std::tuple<Tensor, Tensor, Tensor> rank_requests_op(const Tensor& ids, const std::vector<int64_t>& splits, int64_t ranks) {
  check_flat("rank_requests", "ids", ids);
  const Tensor host = host_ids("rank_requests", ids);
  const Tensor distinct = new_ids({host.numel()});
  const Tensor places = new_ids({host.numel()});
  const rust::Box<Ids> counts = call([&] {
    return rank_requests(ids_slice(host), numbers_slice(splits), ranks, ids_slice_mut(distinct), ids_slice_mut(places));
  });
  std::size_t count = 0;
  for (const int64_t of_piece : counts->ids()) {
    count += static_cast<std::size_t>(of_piece);
  }
  return {first_rows(distinct, count), copied_ids(counts->ids()), places};
}

inline std::tuple<Tensor, Tensor> emb_read_ranks_op(
    const std::vector<Tensor>& tables,
    const Tensor& ids,
    const std::vector<int64_t>& counts,
    const std::vector<int64_t>& dims) {
  const std::vector<int64_t> numbers = tables_of_dims("emb_read", tables, dims);
  check_flat("emb_read", "ids", ids);
  const Tensor host = host_ids("emb_read", ids);
  const Tensor rows = new_floats({rank_elements("emb_read", counts, dims)});
  const Tensor places = new_words(host.numel() + kPlacesTag * static_cast<int64_t>(counts.size()));
  call([&] {
    read_for_ranks(numbers_slice(numbers), ids_slice(host), numbers_slice(counts), numbers_slice(dims),
                   float_slice_mut(rows), words_slice_mut(places));
  });
  return {rows, places};
}

// The bags of features, each over one of several tables.
struct RankBagsOnHost {
  Tensor places;
  Tensor offsets;
  int64_t bags = 0;
  int64_t columns = 0;

  RankBagsOnHost(
      const char* op,
      const std::vector<int64_t>& dims,
      const std::vector<int64_t>& tables,
      const Tensor& places_in,
      const Tensor& offsets_in)
      : places(host_ids(op, places_in, "places")), offsets(host_ids(op, offsets_in, "offsets")) {
    check_flat(op, "places", places);
    check_flat(op, "offsets", offsets);
    if (tables.empty() || offsets.numel() == 0) {
      refuse(op, ": needs features, and offsets that hold at least the end of the last bag");
    }
    bags = (offsets.numel() - 1) / static_cast<int64_t>(tables.size());
    for (const int64_t table : tables) {
      if (table < 0 || table >= static_cast<int64_t>(dims.size())) {
        refuse(op, ": there are ", dims.size(), " tables, got number ", table);
      }
      columns += dims[table];
    }
  }
};

inline Tensor pool_rank_rows_op(
    const Tensor& rows,
    const std::vector<int64_t>& counts,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& tables,
    const Tensor& places,
    const Tensor& offsets) {
  constexpr const char* op = "pool_rank_rows";
  const RankBagsOnHost bags(op, dims, tables, places, offsets);
  const Tensor values = host_floats(op, "rows", rows);
  const Tensor pooled = new_floats({bags.bags, bags.columns});
  call([&] {
    pool_rank_rows(numbers_slice(counts), numbers_slice(dims), numbers_slice(tables), ids_slice(bags.places),
                   ids_slice(bags.offsets), float_slice(values), float_slice_mut(pooled));
  });
  return pooled;
}

inline Tensor spread_rank_grads_op(
    const Tensor& grads,
    const std::vector<int64_t>& counts,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& tables,
    const Tensor& places,
    const Tensor& offsets) {
  constexpr const char* op = "spread_rank_grads";
  const RankBagsOnHost bags(op, dims, tables, places, offsets);
  if (grads.dim() != 2 || grads.size(0) != bags.bags || grads.size(1) != bags.columns) {
    refuse(op, ": expected gradients of shape [", bags.bags, ", ", bags.columns, "], got ", shape_text(grads));
  }
  const Tensor values = host_floats(op, "gradients", grads);
  const Tensor spread = new_floats({rank_elements(op, counts, dims)});
  call([&] {
    spread_rank_grads(numbers_slice(counts), numbers_slice(dims), numbers_slice(tables), ids_slice(bags.places),
                      ids_slice(bags.offsets), float_slice(values), float_slice_mut(spread));
  });
  return spread;
}

inline void accept_rank_grads_op(
    const std::vector<Tensor>& collectors,
    const std::vector<Tensor>& tables,
    const Tensor& ids,
    const std::vector<int64_t>& counts,
    const Tensor& grads,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& padded,
    const std::vector<int64_t>& padding_ids,
    const std::optional<Tensor>& places) {
  constexpr const char* op = "accept_grad";
  const std::vector<int64_t> handles = tables_of_dims(op, tables, dims);
  if (collectors.size() != tables.size() || padded.size() != padding_ids.size()) {
    refuse(op, ": ", tables.size(), " tables need as many collectors, and padding ids as many tables, got ",
           collectors.size(), " collectors and ", padding_ids.size(), " ids for ", padded.size(), " tables");
  }
  std::vector<int64_t> into;
  for (const Tensor& collector : collectors) {
    into.push_back(collector_of(op, collector));
  }
  const auto tensors = std::make_shared<KeptTensors>(
      host_ids(op, ids), host_floats(op, "gradients", grads), std::nullopt, host_places(op, places), true);
  warn(call([&] {
    return accept_rank_grads(numbers_slice(into), numbers_slice(handles), numbers_slice(counts), numbers_slice(dims),
                             numbers_slice(padded), numbers_slice(padding_ids), tensors);
  }));
}

}  // namespace recstore
