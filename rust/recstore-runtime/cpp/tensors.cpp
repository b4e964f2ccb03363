// The tensors that programs may have, and how they come in and go out.

#include "recstore-runtime/cpp/tensors.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "recstore-runtime/src/program.rs.h"

namespace recstore::runtime {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::runtime_error(message);
}

// Those of inputs, of the state and of outputs.
const std::unordered_map<std::string, at::ScalarType> kTypes = {
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},  {"int8", at::kChar},
    {"uint8", at::kByte},    {"bool", at::kBool},
};

// Those that tensors may have within a program alone; complex numbers of half floats too, which no program names.
const std::unordered_map<std::string, at::ScalarType> kInnerTypes = {
    {"complex64", at::kComplexFloat},
    {"complex128", at::kComplexDouble},
};

bool is_known(at::ScalarType type) {
  const auto is = [type](const auto& named) { return named.second == type; };
  return type == at::kComplexHalf || std::any_of(kTypes.begin(), kTypes.end(), is) ||
      std::any_of(kInnerTypes.begin(), kInnerTypes.end(), is);
}

// How libtorch aligns its own tensors. Products of matrices that lie otherwise can have other bits.
constexpr std::uintptr_t kAlignment = 64;

void check_tensor(const at::Tensor& tensor) {
  // What torch calls its variants: sparse, of another device, quantized, of zeros that have no memory.
  static const c10::DispatchKeySet dense = at::empty({0}).key_set();
  const c10::DispatchKeySet bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  if ((tensor.key_set() - bits) != dense) {
    refuse("it gives a tensor that is not a dense one of the CPU: " + c10::toString(tensor.key_set() - dense));
  }
  if (!is_known(tensor.scalar_type())) {
    refuse(std::string("it gives a tensor of type ") + c10::toString(tensor.scalar_type()));
  }
  const std::size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  if (tensor.numel() != 0 && needed > tensor.storage().nbytes()) {
    refuse("it gives a tensor that leaves its storage");
  }
}

}  // namespace

at::ScalarType type_of(const std::string& name) {
  for (const auto* types : {&kTypes, &kInnerTypes}) {
    if (const auto found = types->find(name); found != types->end()) {
      return found->second;
    }
  }
  refuse("this runtime knows no type " + name);
}

const std::string& name_of(at::ScalarType type) {
  for (const auto& [name, each] : kTypes) {
    if (each == type) {
      return name;
    }
  }
  refuse(std::string("this runtime gives no tensors of type ") + c10::toString(type));
}

at::Tensor copy_of(const View& view) {
  const at::IntArrayRef shape(view.shape.data(), view.shape.size());
  at::Tensor copied = at::empty(shape, at::TensorOptions(type_of(std::string(view.dtype))));
  if (copied.nbytes() != view.bytes.size()) {
    refuse("a tensor has other bytes than its shape and type need");
  }
  if (!view.bytes.empty()) {
    std::memcpy(copied.mutable_data_ptr(), view.bytes.data(), view.bytes.size());
  }
  return copied;
}

at::Tensor input_of(const View& view) {
  if (reinterpret_cast<std::uintptr_t>(view.bytes.data()) % kAlignment != 0) {
    return copy_of(view);
  }
  const at::IntArrayRef shape(view.shape.data(), view.shape.size());
  // No operator of a program writes to its arguments.
  return at::from_blob(
      const_cast<uint8_t*>(view.bytes.data()), shape, at::TensorOptions(type_of(std::string(view.dtype))));
}

void check_value(const c10::IValue& value) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      check_tensor(value.toTensor());
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      check_value(element);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toList()) {
      check_value(element);
    }
  } else if (!value.isInt() && !value.isDouble() && !value.isBool() && !value.isNone()) {
    refuse("it gives a value of kind " + value.tagKind());
  }
}

at::Tensor materialized(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    refuse("an output is no tensor");
  }
  const at::Tensor& tensor = value.toTensor();
  name_of(tensor.scalar_type());
  return tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor owned(at::Tensor tensor) {
  const bool is_shared = tensor.use_count() > 1 || tensor.storage().use_count() > 1;
  return is_shared ? tensor.clone() : std::move(tensor);
}

}  // namespace recstore::runtime
