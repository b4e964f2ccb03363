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

#include "rust/cxx.h"

namespace recstore::runtime {

struct Argument;
struct Call;
struct View;

// A tensor that is kept: of the state, or one that a program gave.
class Kept {
 public:
  explicit Kept(const at::Tensor& tensor);

  rust::Str dtype() const;
  rust::Slice<const int64_t> shape() const;
  rust::Slice<const uint8_t> bytes() const;

  const at::Tensor& tensor() const {
    return tensor_;
  }

 private:
  at::Tensor tensor_;
};

// What a program gave.
class Given {
 public:
  explicit Given(std::vector<Kept> tensors) : tensors_(std::move(tensors)) {}

  std::unique_ptr<Kept> get(std::size_t place) const {
    return std::make_unique<Kept>(tensors_.at(place));
  }

 private:
  std::vector<Kept> tensors_;
};

// Where an argument comes from: it is known before, a value of the program, or a list with such values in it.
struct Source {
  struct Value {
    std::size_t number;
  };
  std::variant<c10::IValue, Value, std::vector<Source>> what;

  bool is_known() const;
  c10::IValue in(const std::vector<c10::IValue>& values) const;
};

// One of the functions on sizes, by its name in Python.
using SizeFunction = c10::IValue (*)(const std::vector<c10::IValue>& arguments);

// Returns the function of a name, null for none.
SizeFunction size_function(const std::string& name);

class Program {
 public:
  // The values of a program are numbered: those of the state, the inputs, and what each call gives.
  Program(
      rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
      rust::Slice<const Argument> outputs);

  // What the program gives for inputs, which may be views of memory that outlives the call.
  std::unique_ptr<Given> run(rust::Slice<const View> inputs) const;

 private:
  struct Step {
    std::string name;
    std::variant<c10::OperatorHandle, SizeFunction> function;
    std::vector<Source> arguments;
    // The values that no later step reads.
    std::vector<std::size_t> ended;

    c10::IValue run(const std::vector<c10::IValue>& values) const;
  };

  Step step_of(const Call& call) const;
  void find_ends();

  std::vector<at::Tensor> state_;
  std::size_t inputs_;
  std::vector<Step> steps_;
  Source outputs_;
};

std::unique_ptr<Program> new_program(
    rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
    rust::Slice<const Argument> outputs);

// Whether somebody has defined the operators in this process.
bool has_operators();

void set_num_threads(std::size_t threads);

}  // namespace recstore::runtime
