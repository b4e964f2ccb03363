// Several tensors of ids, on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "recstore-bridge/tensor_check.h"

namespace recstore {

class IdColumns {
 public:
  IdColumns(const char* op, const std::vector<Tensor>& columns) {
    for (const Tensor& column : columns) {
      columns_.push_back(host_ids(op, column));
    }
  }

  std::size_t count() const {
    return columns_.size();
  }

  rust::Slice<const int64_t> column(std::size_t number) const {
    return ids_slice(columns_.at(number));
  }

 private:
  std::vector<Tensor> columns_;
};

}  // namespace recstore
