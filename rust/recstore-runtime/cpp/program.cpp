// Runs programs. A program is checked when it is made; a run checks what its operators give.

#include "recstore-runtime/cpp/program.h"

#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "recstore-runtime/cpp/tensors.h"
#include "recstore-runtime/src/program.rs.h"

namespace recstore::runtime {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::runtime_error(message);
}

// Runs a body; what libtorch throws of it is told without the lines of libtorch that it came from.
template <typename Body>
auto told(const std::string& where, Body body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    refuse(where + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    refuse(where + ": " + error.what());
  } catch (...) {
    refuse(where + ": it threw what is no exception");
  }
}

std::string name_of(const Call& call) {
  return std::string(call.name) + (call.overload.empty() ? "" : "." + std::string(call.overload));
}

c10::OperatorHandle operator_of(const Call& call) {
  const auto found = c10::Dispatcher::singleton().findSchema({std::string(call.name), std::string(call.overload)});
  if (!found) {
    refuse("this libtorch has no such operator");
  }
  std::ostringstream schema;
  schema << found->schema();
  if (!call.schema.empty() && schema.str() != std::string(call.schema)) {
    refuse("expected the schema " + std::string(call.schema) + ", this libtorch has " + schema.str());
  }
  return *found;
}

std::vector<Source> read_all(rust::Slice<const Argument> given, std::size_t& place, std::size_t count) {
  std::vector<Source> sources;
  for (std::size_t each = 0; each < count; ++each) {
    sources.push_back(Source::read(given, place));
  }
  return sources;
}

}  // namespace

rust::Str Kept::dtype() const {
  return recstore::runtime::name_of(tensor_.scalar_type());
}

rust::Slice<const int64_t> Kept::shape() const {
  return {tensor_.sizes().data(), tensor_.sizes().size()};
}

rust::Slice<const uint8_t> Kept::bytes() const {
  return {static_cast<const uint8_t*>(tensor_.const_data_ptr()), tensor_.nbytes()};
}

Program::Program(
    rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
    rust::Slice<const std::size_t> outputs)
    : inputs_(inputs), outputs_(outputs.begin(), outputs.end()) {
  for (const View& view : state) {
    state_.push_back(copy_of(view));
    is_handle_.push_back(view.is_handle);
  }
  for (const Call& call : calls) {
    steps_.push_back(told(name_of(call), [&] { return step_of(call); }));
  }
  for (const std::size_t output : outputs_) {
    if (output < is_handle_.size() && is_handle_[output]) {
      refuse("an output is the handle of a table");
    }
  }
  find_ends();
}

Program::Step Program::step_of(const Call& call) const {
  const rust::Slice<const Argument> given(call.arguments.data(), call.arguments.size());
  std::size_t place = 0;
  std::vector<Source> by_place = read_all(given, place, call.positional);
  if (const SizeFunction* function = size_function(std::string(call.name))) {
    if (by_place.size() != function->arity || !call.keys.empty()) {
      refuse("it takes " + std::to_string(function->arity) + " arguments, by place");
    }
    return {name_of(call), function, std::move(by_place), {}};
  }
  std::vector<Source> by_name = read_all(given, place, call.keys.size());
  const c10::OperatorHandle found = operator_of(call);
  const rust::Slice<const rust::String> keys(call.keys.data(), call.keys.size());
  std::vector<Source> arguments = arranged(found.schema(), std::move(by_place), keys, std::move(by_name));
  check_rules(found.schema(), arguments, is_handle_, !call.schema.empty());
  return {name_of(call), Operator{found, KernelCheck(found.schema())}, std::move(arguments), {}};
}

// For each step the values that it reads last, so that their memory can be used again.
void Program::find_ends() {
  const std::size_t first = state_.size() + inputs_;
  std::unordered_map<std::size_t, std::size_t> last;
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    last[first + step] = step;
    for (const Source& argument : steps_[step].arguments) {
      each_value(argument, [&](std::size_t value) { last[value] = step; });
    }
  }
  for (const std::size_t output : outputs_) {
    last[output] = steps_.size();
  }
  for (const auto& [value, step] : last) {
    if (value >= first && step < steps_.size()) {
      steps_[step].ended.push_back(value);
    }
  }
}

c10::IValue Program::Step::run(const Values& values) const {
  std::vector<c10::IValue> stack;
  stack.reserve(arguments.size());
  if (const auto* of_sizes = std::get_if<const SizeFunction*>(&function)) {
    for (const Source& argument : arguments) {
      stack.push_back(plain(argument, values));
    }
    return (**of_sizes)(stack);
  }
  const auto& [handle, check] = std::get<Operator>(function);
  for (std::size_t each = 0; each < arguments.size(); ++each) {
    stack.push_back(fitted(arguments[each], handle.schema().arguments()[each], values));
  }
  check(stack);
  handle.callBoxed(stack);
  for (const c10::IValue& value : stack) {
    check_value(value);
  }
  if (stack.size() == 1) {
    return std::move(stack.front());
  }
  return stack.empty() ? c10::IValue() : c10::IValue(c10::ivalue::Tuple::create(std::move(stack)));
}

std::unique_ptr<Outputs> Program::run(rust::Slice<const View> inputs) const {
  const at::NoGradGuard no_gradients;
  Values values(state_.begin(), state_.end());
  values.reserve(state_.size() + inputs_ + steps_.size());
  for (const View& input : inputs) {
    values.emplace_back(input_of(input));
  }
  for (const Step& step : steps_) {
    values.push_back(told(step.name, [&] { return step.run(values); }));
    for (const std::size_t ended : step.ended) {
      values[ended] = c10::IValue();
    }
  }
  return told("what the program gives", [&] {
    std::vector<at::Tensor> outputs;
    for (const std::size_t output : outputs_) {
      outputs.push_back(materialized(values[output]));
    }
    // Whoever holds the memory of an output from here on is the state, an input, or another output.
    values.resize(state_.size() + inputs_);
    for (at::Tensor& output : outputs) {
      output = owned(std::move(output));
    }
    return std::make_unique<Outputs>(std::move(outputs));
  });
}

std::unique_ptr<Program> new_program(
    rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
    rust::Slice<const std::size_t> outputs) {
  return std::make_unique<Program>(state, inputs, calls, outputs);
}

bool has_operators() {
  return c10::Dispatcher::singleton().findSchema({"recstore::emb_read", "table"}).has_value();
}

void set_num_threads(std::size_t threads) {
  at::set_num_threads(static_cast<int>(threads));
}

}  // namespace recstore::runtime
