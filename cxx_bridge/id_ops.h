// The operators that make ids of something else. They touch no store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "recstore-bridge/arguments.h"
#include "recstore-bridge/id_columns.h"
#include "recstore-bridge/new_tensor.h"
#include "recstore-bridge/src/lib.rs.h"
#include "recstore-bridge/tensor_check.h"

namespace recstore {

inline Tensor hash_strings_op(const Tensor& characters, const Tensor& offsets, int64_t seed) {
  constexpr const char* op = "hash_strings";
  check_flat(op, "characters", characters);
  check_flat(op, "offsets", offsets);
  const int32_t dtype = dtype_of(offsets);
  const bool is_narrow = dtype == aoti_torch_dtype_int32();
  if (dtype_of(characters) != aoti_torch_dtype_uint8() || !(is_narrow || dtype == aoti_torch_dtype_int64())) {
    refuse(op, ": characters must be uint8 and offsets int32 or int64, got ",
           torch::headeronly::toString(characters.scalar_type()), " and ",
           torch::headeronly::toString(offsets.scalar_type()));
  }
  if (offsets.numel() == 0) {
    refuse(op, ": offsets must hold at least the end of the last string, got none");
  }
  const Tensor host = on_host(characters);
  const Tensor ends = on_host(offsets);
  const Tensor ids = new_ids({offsets.numel() - 1});
  call([&] {
    if (is_narrow) {
      hash_strings_32(slice_of<uint8_t>(host), slice_of<int32_t>(ends), seed, ids_slice_mut(ids));
    } else {
      hash_strings_64(slice_of<uint8_t>(host), slice_of<int64_t>(ends), seed, ids_slice_mut(ids));
    }
  });
  return to_device_of(characters, ids);
}

inline Tensor cross_ids_op(const std::vector<Tensor>& ids, int64_t seed) {
  constexpr const char* op = "cross_ids";
  if (ids.empty()) {
    refuse(op, ": expected at least one tensor of ids, got none");
  }
  const std::vector<int64_t> shape = shape_of(ids[0]);
  for (std::size_t number = 1; number < ids.size(); ++number) {
    if (shape_of(ids[number]) != shape) {
      refuse(op, ": ids must have one shape, got ", shape_text(ids[0]), " at position 0 and ", shape_text(ids[number]),
             " at position ", number);
    }
  }
  const IdColumns columns(op, ids);
  const Tensor crossed = new_ids(shape);
  call([&] { cross_ids(columns, seed, ids_slice_mut(crossed)); });
  return to_device_of(ids[0], crossed);
}

inline Tensor ngram_ids_op(const Tensor& tokens, int64_t n, int64_t tables, int64_t vocab, int64_t seed) {
  constexpr const char* op = "ngram_ids";
  if (tokens.dim() == 0) {
    refuse(op, ": tokens must have at least one dimension, got shape []");
  }
  // Before ids are made, whose number depends on `tables`.
  call([&] { check_ngrams(n, tables, vocab); });
  const Tensor host = host_ids(op, tokens, "tokens");
  const Tensor ids = new_ids(row_shape(tokens, tables));
  call([&] {
    ngram_ids(ids_slice(host), static_cast<std::size_t>(tokens.size(-1)), n, tables, vocab, seed, ids_slice_mut(ids));
  });
  return to_device_of(tokens, ids);
}

inline Tensor prefix_ids_op(const Tensor& codes, const std::vector<int64_t>& sizes) {
  constexpr const char* op = "prefix_ids";
  if (codes.dim() == 0 || codes.size(-1) != static_cast<int64_t>(sizes.size())) {
    refuse(op, ": codes must have a last dimension of ", sizes.size(), ", one code a size, got shape ",
           shape_text(codes));
  }
  const rust::Slice<const int64_t> levels = numbers_slice(sizes);
  call([&] { check_prefix_sizes(levels); });
  const Tensor host = host_ids(op, codes, "codes");
  const Tensor ids = new_ids(shape_of(codes));
  call([&] { prefix_ids(ids_slice(host), levels, ids_slice_mut(ids)); });
  return to_device_of(codes, ids);
}

inline Tensor bucket_ids_op(const Tensor& ids, int64_t buckets, int64_t seed) {
  const Tensor host = host_ids("bucket_ids", ids);
  const Tensor bucketed = new_ids(shape_of(ids));
  call([&] { bucket_ids(ids_slice(host), buckets, seed, ids_slice_mut(bucketed)); });
  return to_device_of(ids, bucketed);
}

}  // namespace recstore
