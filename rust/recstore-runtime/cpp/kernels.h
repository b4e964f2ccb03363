// What the kernels of listed operators do not check themselves: they end the process, or give memory as they find it.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace recstore::runtime {

// Checks the arguments of one operator.
class KernelCheck {
 public:
  explicit KernelCheck(const c10::FunctionSchema& schema);

  // Throws if the kernel would leave its memory, or divide where processors trap.
  void operator()(const std::vector<c10::IValue>& arguments) const;

 private:
  // The places of arguments that say how large windows are.
  std::vector<std::size_t> windows_;
  void (*check_)(const std::vector<c10::IValue>& arguments);
};

}  // namespace recstore::runtime
