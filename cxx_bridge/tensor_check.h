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

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "rust/cxx.h"

namespace recstore {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Keeps who refused beside the text of the error.
void note(const std::string& operation, const std::string& message);

// A RuntimeError in Python, by the operator that begins the message.
template <typename... Parts>
[[noreturn]] void refuse(const std::string& operation, const Parts&... parts) {
  std::ostringstream message;
  ((message << operation) << ... << parts);
  note(operation, message.str());
  throw std::runtime_error(message.str());
}

// "[2, 3]"
inline std::string shape_text(IntHeaderOnlyArrayRef sizes) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const int64_t size : sizes) {
    text << separator << size;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

inline std::string shape_text(const Tensor& tensor) {
  return shape_text(tensor.sizes());
}

// Comparing these numbers costs less than torch's ScalarType, which is looked up one dtype after the other.
inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// The bytes of an element of a dtype that operators take.
inline size_t bytes_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_uint8() || dtype == aoti_torch_dtype_int8()) {
    return 1;
  }
  if (dtype == aoti_torch_dtype_int16() || dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16()) {
    return 2;
  }
  return dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_int32() ? 4 : 8;
}

// Whether the first element lies where one of its type may. Torch takes any byte of a buffer, Rust does not.
inline bool is_aligned(const Tensor& host) {
  const auto address = reinterpret_cast<uintptr_t>(host.const_data_ptr());
  return address % sizeof(int64_t) == 0 || address % bytes_of(dtype_of(host)) == 0;
}

// On the CPU, contiguous and aligned; the same tensor where it already is. A copy from a device has arrived when this
// returns.
inline Tensor on_host(const Tensor& tensor) {
  Tensor host = tensor.is_cpu()
      ? tensor
      : torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  host = host.is_contiguous() ? host : torch::stable::contiguous(host);
  return is_aligned(host) ? host : torch::stable::clone(host);
}

// A result of the host, moved to the device of `like`.
inline Tensor to_device_of(const Tensor& like, const Tensor& result) {
  return like.is_cpu() ? result : torch::stable::to(result, like.device());
}

// Ids, or offsets, on the host as int64. uint64 ids keep their bits; narrower ones are widened. `what` names them in
// the message.
inline Tensor host_ids(const char* op, const Tensor& ids, const char* what = "ids") {
  const int32_t dtype = dtype_of(ids);
  if (dtype == aoti_torch_dtype_int64() || dtype == aoti_torch_dtype_uint64()) {
    return on_host(ids);
  }
  if (dtype == aoti_torch_dtype_int32() || dtype == aoti_torch_dtype_int16() || dtype == aoti_torch_dtype_int8() ||
      dtype == aoti_torch_dtype_uint8()) {
    return torch::stable::to(on_host(ids), ScalarType::Long);
  }
  refuse(op, ": ", what, " must be int64, uint64, int32, int16, int8 or uint8, got ",
         torch::headeronly::toString(ids.scalar_type()));
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
template <typename Element>
inline rust::Slice<const Element> slice_of(const Tensor& values) {
  return {static_cast<const Element*>(values.const_data_ptr()), static_cast<size_t>(values.numel())};
}

inline rust::Slice<const int64_t> ids_slice(const Tensor& ids) {
  return slice_of<int64_t>(ids);
}

inline rust::Slice<int64_t> ids_slice_mut(const Tensor& ids) {
  return {static_cast<int64_t*>(ids.mutable_data_ptr()), static_cast<size_t>(ids.numel())};
}

inline rust::Slice<const float> float_slice(const Tensor& values) {
  return slice_of<float>(values);
}

inline rust::Slice<float> float_slice_mut(const Tensor& values) {
  return {static_cast<float*>(values.mutable_data_ptr()), static_cast<size_t>(values.numel())};
}

inline rust::Slice<uint32_t> words_slice_mut(const Tensor& words) {
  return {static_cast<uint32_t*>(words.mutable_data_ptr()), static_cast<size_t>(words.numel())};
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
