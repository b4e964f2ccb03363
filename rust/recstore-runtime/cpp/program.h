// A program as a list of operator calls, run by libtorch's dispatcher. See src/program.rs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "recstore-runtime/cpp/arguments.h"
#include "recstore-runtime/cpp/kernels.h"
#include "recstore-runtime/cpp/size_functions.h"
#include "rust/cxx.h"

namespace recstore::runtime {

struct Call;
struct View;

// A tensor that a program gave: nothing else holds its memory.
class Kept {
 public:
  explicit Kept(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  rust::Str dtype() const;
  rust::Slice<const int64_t> shape() const;
  rust::Slice<const uint8_t> bytes() const;

 private:
  at::Tensor tensor_;
};

// What a program gave.
class Outputs {
 public:
  explicit Outputs(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  // Takes an output, once.
  std::unique_ptr<Kept> take(std::size_t place) {
    return std::make_unique<Kept>(std::move(tensors_.at(place)));
  }

 private:
  std::vector<at::Tensor> tensors_;
};

class Program {
 public:
  // The values of a program are numbered: those of the state, the inputs, and what each call gives.
  Program(
      rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
      rust::Slice<const std::size_t> outputs);

  // What the program gives for inputs, which may be views of memory that outlives the call.
  std::unique_ptr<Outputs> run(rust::Slice<const View> inputs) const;

 private:
  struct Operator {
    c10::OperatorHandle handle;
    KernelCheck check;
  };

  struct Step {
    std::string name;
    std::variant<Operator, const SizeFunction*> function;
    std::vector<Source> arguments;
    // The values that no later step reads.
    std::vector<std::size_t> ended;

    c10::IValue run(const Values& values) const;
  };

  Step step_of(const Call& call) const;
  void find_ends();

  std::vector<at::Tensor> state_;
  std::vector<bool> is_handle_;
  std::size_t inputs_;
  std::vector<Step> steps_;
  std::vector<std::size_t> outputs_;
};

std::unique_ptr<Program> new_program(
    rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
    rust::Slice<const std::size_t> outputs);

// Whether somebody has defined the operators in this process.
bool has_operators();

void set_num_threads(std::size_t threads);

}  // namespace recstore::runtime
