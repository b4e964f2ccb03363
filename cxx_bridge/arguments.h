// What kernels are given, checked and turned into what Rust takes, and what Rust gives turned into tensors.
#pragma once

#include <algorithm>
#include <cstring>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "recstore-bridge/new_tensor.h"
#include "recstore-bridge/src/lib.rs.h"
#include "recstore-bridge/tensor_check.h"

namespace recstore {

// Calls into Rust. An error of an id out of its range becomes an IndexError in Python, any other a RuntimeError.
template <typename Body>
auto call(Body&& body) {
  try {
    return body();
  } catch (const rust::Error& error) {
    // By its text, which is all of an error that comes over the bridge.
    if (is_index_error(error.what())) {
      throw std::out_of_range(error.what());
    }
    throw;
  }
}

// Checks the kind of tensor that a handle is.
inline void check_handle(const char* op, const char* what, const Tensor& handle, const std::vector<int64_t>& shape) {
  const IntHeaderOnlyArrayRef sizes = handle.sizes();
  if (dtype_of(handle) == aoti_torch_dtype_int64() && handle.is_cpu() && handle.is_contiguous() &&
      std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    return;
  }
  if (!handle.defined()) {
    refuse(op, ": ", what, " must be a handle, got an undefined tensor, which TorchScript leaves in a constant list");
  }
  refuse(op, ": ", what, " must be a handle, a contiguous int64 CPU tensor of shape ", shape_text(shape), ", got ",
         torch::headeronly::toString(handle.scalar_type()), " of shape ", shape_text(handle),
         handle.is_cpu() ? "" : " on another device", handle.is_contiguous() ? "" : ", not contiguous");
}

// The words of a table's handle: its number and the table's name.
inline rust::Slice<const int64_t> table_words(const char* op, const Tensor& table) {
  static const std::vector<int64_t> shape{static_cast<int64_t>(handle_words())};
  check_handle(op, "table", table, shape);
  return ids_slice(table);
}

// The number of the table that a handle means, which the functions in Rust take.
inline int64_t table_of(const char* op, const Tensor& table) {
  return call([&] { return find_table(op, table_words(op, table)); });
}

// The number of a collector's handle.
inline int64_t collector_of(const char* op, const Tensor& collector) {
  check_handle(op, "collector", collector, {});
  return ids_slice(collector)[0];
}

inline rust::Slice<const int64_t> numbers_slice(const std::vector<int64_t>& numbers) {
  return {numbers.data(), numbers.size()};
}

inline rust::Str text(const std::string& value) {
  return {value.data(), value.size()};
}

inline std::size_t checked_dim(const char* op, int64_t dim) {
  if (dim <= 0) {
    refuse(op, ": dim must be at least 1, got ", dim);
  }
  return static_cast<std::size_t>(dim);
}

// The number of the table that a handle means, whose rows must have `dim` elements.
inline int64_t table_of_dim(const char* op, const char* what, const Tensor& table, int64_t dim) {
  const rust::Slice<const int64_t> words = table_words(op, table);
  const std::size_t width = checked_dim(op, dim);
  return call([&] { return check_dim(op, what, words, width); });
}

// Checks that there is a row for each id, [..., dim] for ids [...], and returns dim. `name` gives the table's name.
template <typename Name>
inline int64_t row_dim(const char* op, const char* what, const Name& name, const Tensor& ids, const Tensor& rows) {
  const IntHeaderOnlyArrayRef expected = ids.sizes();
  const IntHeaderOnlyArrayRef actual = rows.sizes();
  if (actual.size() != expected.size() + 1 || !std::equal(expected.begin(), expected.end(), actual.begin())) {
    refuse(op, ": ", name(), " got ids of shape ", shape_text(ids), ", so ", what,
           " must have that shape and dim, got ", shape_text(rows));
  }
  return actual[expected.size()];
}

// The number of the table that a handle means, for which there must be a row of its dim for each id. Messages call all of them
// `what` and those of a wrong dim `row_text`.
inline int64_t table_of_rows(
    const char* op, const char* what, const char* row_text, const Tensor& table, const Tensor& ids, const Tensor& rows) {
  // A function: only a message needs the name, which takes a search of its own.
  const auto name = [&] { return std::string(table_text(op, table_words(op, table))); };
  return table_of_dim(op, row_text, table, row_dim(op, what, name, ids, rows));
}

// The dim of the default table that rows are for.
inline std::size_t default_dim(const char* op, const char* what, const Tensor& ids, const Tensor& rows) {
  const auto name = [&] {
    return "table \"default/" + std::to_string(rows.dim() > 0 ? rows.size(-1) : 0) + "\"";
  };
  return checked_dim(op, row_dim(op, what, name, ids, rows));
}

// A span of one id, or of none.
inline rust::Slice<const int64_t> optional_id(const std::optional<int64_t>& id) {
  return id ? rust::Slice<const int64_t>(&*id, 1) : rust::Slice<const int64_t>();
}

template <typename T>
inline Tensor copied(const rust::Slice<const T>& values, const Tensor& out) {
  std::copy(values.begin(), values.end(), static_cast<T*>(out.mutable_data_ptr()));
  return out;
}

inline Tensor copied_ids(const rust::Slice<const int64_t>& ids) {
  return copied(ids, new_ids({static_cast<int64_t>(ids.size())}));
}

inline void check_flat(const char* op, const char* what, const Tensor& tensor) {
  if (tensor.dim() != 1) {
    refuse(op, ": ", what, " must be 1-d, got shape ", shape_text(tensor));
  }
}

// The words that the tag of places takes.
constexpr int64_t kPlacesTag = 2;

// Places as a lookup gave them out; what does not fit is of no effect.
inline std::optional<Tensor> host_places(const char* op, const std::optional<Tensor>& places) {
  if (!places) {
    return std::nullopt;
  }
  if (dtype_of(*places) != aoti_torch_dtype_int32()) {
    refuse(op, ": places must be int32, as a lookup gave them, got ",
           torch::headeronly::toString(places->scalar_type()));
  }
  return on_host(*places);
}

// Tells of gradients that nobody applies.
inline void warn(const rust::String& overdue) {
  if (!overdue.empty()) {
    std::cerr << "recstore_ops: warning: " << std::string(overdue) << '\n';
  }
}

inline Tensor first_rows(const Tensor& rows, std::size_t count) {
  Tensor whole = rows;
  return torch::stable::narrow(whole, 0, 0, static_cast<int64_t>(count));
}

}  // namespace recstore
