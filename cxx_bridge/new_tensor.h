// Tensors for results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "recstore-bridge/src/lib.rs.h"
#include "recstore-bridge/tensor_check.h"

namespace recstore {

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

// A contiguous shape.
struct Shape {
  explicit Shape(const std::vector<int64_t>& sizes) : sizes(sizes), strides(sizes.size()) {
    for (size_t axis = sizes.size(); axis-- > 0;) {
      strides[axis] = count;
      count *= sizes[axis] > 0 ? sizes[axis] : 1;
    }
  }

  const std::vector<int64_t>& sizes;
  std::vector<int64_t> strides;
  int64_t count = 1;
};

// A tensor in memory that is kept for the next one; null where the system refuses it.
inline AtenTensorHandle large_tensor(const Shape& shape, int32_t dtype, std::size_t bytes) {
  rust::Box<LargeResult> memory = large_result(bytes);
  constexpr int32_t kNoDeviceIndex = -1;
  AtenTensorHandle handle = nullptr;
  if (void* start = memory->start()) {
    const auto give_back = [](void*, void* memory) {
      rust::Box<LargeResult>::from_raw(static_cast<LargeResult*>(memory));
    };
    TORCH_ERROR_CODE_CHECK(torch_from_blob(
        start,
        static_cast<int64_t>(shape.sizes.size()),
        shape.sizes.data(),
        shape.strides.data(),
        0,
        dtype,
        aoti_torch_device_type_cpu(),
        kNoDeviceIndex,
        &handle,
        aoti_torch_layout_strided(),
        nullptr,
        0,
        give_back,
        &*memory));
    // Only now the tensor owns it: after an error above the box would have given it back.
    std::move(memory).into_raw();
  }
  return handle;
}

// A new contiguous tensor on the host, not initialized. torch::stable::empty goes through the dispatcher, which costs
// as much as reading a row.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, int32_t dtype, std::size_t element_bytes) {
  const Shape shape(sizes);
  const std::size_t bytes = static_cast<std::size_t>(shape.count) * element_bytes;
  if (bytes >= large_result_bytes()) {
    if (AtenTensorHandle large = large_tensor(shape, dtype, bytes)) {
      return Tensor(large);
    }
  }
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()),
      sizes.data(),
      shape.strides.data(),
      dtype,
      aoti_torch_device_type_cpu(),
      0,
      &handle);
  if (error != AOTI_TORCH_SUCCESS) {
    refuse("no memory for a result of shape ", shape_text(sizes), ", ", bytes, " bytes");
  }
  const Tensor made(handle);
  advise_huge_pages(made.mutable_data_ptr(), bytes);
  return made;
}

inline Tensor new_floats(const std::vector<int64_t>& sizes) {
  return new_tensor(sizes, aoti_torch_dtype_float32(), sizeof(float));
}

inline Tensor new_ids(const std::vector<int64_t>& sizes) {
  return new_tensor(sizes, aoti_torch_dtype_int64(), sizeof(int64_t));
}

// 32-bit words, int32 for torch.
inline Tensor new_words(int64_t count) {
  return new_tensor({count}, aoti_torch_dtype_int32(), sizeof(uint32_t));
}

}  // namespace recstore
