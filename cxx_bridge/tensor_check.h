// What an operator needs of its tensors: on the host, contiguous, of the right dtype and shape, as slices for Rust.
//
// Messages name the operator and say what was expected and what came:
//   emb_update: table "user" has dim 64, got gradient rows of 32
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "rust/cxx.h"

namespace recstore {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A RuntimeError in Python.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// "[2, 3]"
inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const int64_t size : tensor.sizes()) {
    text << separator << size;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

// On the CPU and contiguous; the same tensor where it already is. A copy from a device has arrived when this returns.
inline Tensor on_host(const Tensor& tensor) {
  Tensor host = tensor.is_cpu()
      ? tensor
      : torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  return host.is_contiguous() ? host : torch::stable::contiguous(host);
}

// A result of the host, moved to the device of `like`.
inline Tensor to_device_of(const Tensor& like, const Tensor& result) {
  return like.is_cpu() ? result : torch::stable::to(result, like.device());
}

// Comparing these numbers costs less than torch's ScalarType, which is looked up one dtype after the other.
inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// Ids, or offsets, on the host as int64. uint64 ids keep their bits; int32 ids are widened. `what` names them in the
// message.
inline Tensor host_ids(const char* op, const Tensor& ids, const char* what = "ids") {
  const int32_t dtype = dtype_of(ids);
  if (dtype == aoti_torch_dtype_int64() || dtype == aoti_torch_dtype_uint64()) {
    return on_host(ids);
  }
  if (dtype == aoti_torch_dtype_int32()) {
    return torch::stable::to(on_host(ids), ScalarType::Long);
  }
  refuse(op, ": ", what, " must be int64, uint64 or int32, got ", torch::headeronly::toString(ids.scalar_type()));
}

// Rows, gradients or weights on the host as float32. `what` names them in the message, such as "gradients".
inline Tensor host_floats(const char* op, const char* what, const Tensor& values) {
  const int32_t dtype = dtype_of(values);
  if (dtype == aoti_torch_dtype_float32()) {
    return on_host(values);
  }
  if (dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16() ||
      dtype == aoti_torch_dtype_float64()) {
    return torch::stable::to(on_host(values), ScalarType::Float);
  }
  refuse(op, ": ", what, " must be floating point, got ", torch::headeronly::toString(values.scalar_type()));
}

// The slices are valid as long as the tensor is, which must be contiguous and on the host.
inline rust::Slice<const int64_t> ids_slice(const Tensor& ids) {
  return {static_cast<const int64_t*>(ids.const_data_ptr()), static_cast<size_t>(ids.numel())};
}

inline rust::Slice<int64_t> ids_slice_mut(const Tensor& ids) {
  return {static_cast<int64_t*>(ids.mutable_data_ptr()), static_cast<size_t>(ids.numel())};
}

inline rust::Slice<const float> float_slice(const Tensor& values) {
  return {static_cast<const float*>(values.const_data_ptr()), static_cast<size_t>(values.numel())};
}

inline rust::Slice<float> float_slice_mut(const Tensor& values) {
  return {static_cast<float*>(values.mutable_data_ptr()), static_cast<size_t>(values.numel())};
}

// Asks for huge pages where a large result will lie: supplied page by page, its memory would cost more than its values.
// A refusal is harmless, and so is advice for memory that had pages before.
inline void advise_huge_pages(void* start, std::size_t bytes) {
#ifdef __linux__
  constexpr std::size_t kLarge = 4 << 20;
  constexpr std::size_t kPage = 4096;
  if (bytes >= kLarge) {
    const std::size_t within = reinterpret_cast<std::uintptr_t>(start) % kPage;
    const std::size_t skipped = within == 0 ? 0 : kPage - within;
    madvise(static_cast<char*>(start) + skipped, bytes - skipped, MADV_HUGEPAGE);
  }
#endif
}

// A new contiguous tensor on the host, not initialized. torch::stable::empty goes through the dispatcher, which costs
// as much as reading a row.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= sizes[axis] > 0 ? sizes[axis] : 1;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()),
      sizes.data(),
      strides.data(),
      dtype,
      aoti_torch_device_type_cpu(),
      0,
      &handle));
  const Tensor made(handle);
  // All dtypes here have four bytes or eight.
  advise_huge_pages(made.mutable_data_ptr(), static_cast<std::size_t>(stride) * sizeof(float));
  return made;
}

inline Tensor new_floats(const std::vector<int64_t>& sizes) {
  return new_tensor(sizes, aoti_torch_dtype_float32());
}

inline Tensor new_ids(const std::vector<int64_t>& sizes) {
  return new_tensor(sizes, aoti_torch_dtype_int64());
}

inline rust::Slice<uint32_t> words_slice_mut(const Tensor& words) {
  return {static_cast<uint32_t*>(words.mutable_data_ptr()), static_cast<size_t>(words.numel())};
}

// 32-bit words, int32 for torch.
inline Tensor new_words(int64_t count) {
  return new_tensor({count}, aoti_torch_dtype_int32());
}

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  const IntHeaderOnlyArrayRef sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// The shape of the rows of ids: [..., dim].
inline std::vector<int64_t> row_shape(const Tensor& ids, int64_t dim) {
  std::vector<int64_t> shape = shape_of(ids);
  shape.push_back(dim);
  return shape;
}

}  // namespace recstore
