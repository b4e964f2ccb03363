// Ids and gradients of a backward pass that a collector keeps where they are until the optimizer's step.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include <torch/csrc/stable/library.h>

#include "recstore-bridge/tensor_check.h"

namespace recstore {

// How often a tensor was changed in place; none where torch does not count, for tensors of inference mode.
inline std::optional<int64_t> version_of(const Tensor& tensor) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(tensor)};
  try {
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_version", "", stack.data(), TORCH_ABI_VERSION));
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return torch::stable::detail::to<int64_t>(stack[0]);
}

// A tensor that must not change while it is kept: the tensor itself, or a copy where nobody would notice a change.
class KeptTensor {
 public:
  KeptTensor(const Tensor& tensor, bool keep)
      : version_(keep ? version_of(tensor) : std::nullopt),
        tensor_(version_ ? tensor : torch::stable::clone(tensor)),
        start_(tensor_.const_data_ptr()),
        count_(tensor_.numel()),
        dtype_(dtype_of(tensor_)) {}

  const Tensor& get() const {
    return tensor_;
  }

  // Whether its memory, dtype or shape were replaced, which torch does not count.
  bool was_replaced() const {
    return tensor_.const_data_ptr() != start_ || tensor_.numel() != count_ || dtype_of(tensor_) != dtype_ ||
        !tensor_.is_contiguous();
  }

  // Whether it was replaced, or its values were changed in place.
  bool was_changed() const {
    return was_replaced() || (version_ && version_of(tensor_) != version_);
  }

 private:
  // Before `tensor_`: members are made in the order of declaration, and without a version the tensor is copied.
  std::optional<int64_t> version_;
  Tensor tensor_;
  const void* start_;
  int64_t count_;
  int32_t dtype_;
};

class KeptTensors {
 public:
  // All tensors are contiguous and on the host; `keep` says whether they may be kept without a copy.
  KeptTensors(
      const Tensor& ids,
      const Tensor& gradients,
      const std::optional<Tensor>& weights,
      const std::optional<Tensor>& places,
      bool keep)
      : ids_(ids, keep), gradients_(gradients, keep) {
    if (weights) {
      weights_.emplace(*weights, keep);
    }
    if (places) {
      places_.emplace(*places, keep);
    }
  }

  rust::Slice<const int64_t> ids() const {
    return ids_slice(ids_.get());
  }

  rust::Slice<const float> gradients() const {
    return float_slice(gradients_.get());
  }

  rust::Slice<const float> weights() const {
    return weights_ ? float_slice(weights_->get()) : rust::Slice<const float>();
  }

  // Their tag tells whether their values were changed.
  rust::Slice<const uint32_t> places() const {
    if (!places_ || places_->was_replaced()) {
      return {};
    }
    const Tensor& places = places_->get();
    return {static_cast<const uint32_t*>(places.const_data_ptr()), static_cast<std::size_t>(places.numel())};
  }

  // Changed places count as none.
  bool were_changed() const {
    return ids_.was_changed() || gradients_.was_changed() || (weights_ && weights_->was_changed());
  }

 private:
  KeptTensor ids_;
  KeptTensor gradients_;
  std::optional<KeptTensor> weights_;
  std::optional<KeptTensor> places_;
};

}  // namespace recstore
