// Runs programs. Every type of an argument that operators take is here; what has none is refused when it is read.

#include "recstore-runtime/cpp/program.h"

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

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
  }
}

const std::unordered_map<std::string, at::ScalarType> kTypes = {
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},  {"int8", at::kChar},
    {"uint8", at::kByte},    {"bool", at::kBool},
};

at::ScalarType type_of(const std::string& name) {
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? throw std::runtime_error("this runtime knows no type " + name) : found->second;
}

const std::string& name_of(at::ScalarType type) {
  for (const auto& [name, each] : kTypes) {
    if (each == type) {
      return name;
    }
  }
  refuse(std::string("this runtime knows no tensors of type ") + c10::toString(type));
}

at::Tensor copy_of(const View& view) {
  const at::IntArrayRef shape(view.shape.data(), view.shape.size());
  at::Tensor copied = at::empty(shape, at::TensorOptions(type_of(std::string(view.dtype))));
  if (copied.nbytes() != view.bytes.size()) {
    refuse("a tensor has other bytes than its shape and type need");
  }
  std::memcpy(copied.mutable_data_ptr(), view.bytes.data(), view.bytes.size());
  return copied;
}

// How libtorch aligns its own tensors. Products of matrices that lie otherwise can have other bits.
constexpr std::uintptr_t kAlignment = 64;

at::Tensor input_of(const View& view) {
  if (reinterpret_cast<std::uintptr_t>(view.bytes.data()) % kAlignment != 0) {
    return copy_of(view);
  }
  const at::IntArrayRef shape(view.shape.data(), view.shape.size());
  // Programs write to no input: those that would have no graph.
  return at::from_blob(
      const_cast<uint8_t*>(view.bytes.data()), shape, at::TensorOptions(type_of(std::string(view.dtype))));
}

// Constants.

c10::IValue layout_of(const std::string& name) {
  return name == "strided" ? c10::IValue(c10::kStrided) : throw std::runtime_error("this runtime knows no layout " + name);
}

c10::IValue memory_format_of(const std::string& name) {
  static const std::unordered_map<std::string, c10::MemoryFormat> formats = {
      {"contiguous_format", c10::MemoryFormat::Contiguous},
      {"preserve_format", c10::MemoryFormat::Preserve},
      {"channels_last", c10::MemoryFormat::ChannelsLast},
      {"channels_last_3d", c10::MemoryFormat::ChannelsLast3d},
  };
  const auto found = formats.find(name);
  return found == formats.end() ? throw std::runtime_error("this runtime knows no memory format " + name) : found->second;
}

c10::IValue constant_of(const Argument& argument) {
  const std::string text(argument.text);
  switch (argument.kind) {
    case Kind::Nothing:
      return c10::IValue();
    case Kind::Bool:
      return c10::IValue(argument.number != 0);
    case Kind::Int:
      return c10::IValue(argument.number);
    case Kind::Float:
      return c10::IValue(argument.real);
    case Kind::Text:
      return c10::IValue(text);
    case Kind::DType:
      return c10::IValue(type_of(text));
    case Kind::Device:
      return c10::IValue(c10::Device(text));
    case Kind::Layout:
      return layout_of(text);
    case Kind::MemoryFormat:
      return memory_format_of(text);
    default:
      refuse("an argument of no kind");
  }
}

// Reads one argument from `place` on, which is then behind it: the elements of a list follow it.
Source source_of(rust::Slice<const Argument> arguments, std::size_t& place) {
  const Argument& argument = arguments[place++];
  if (argument.kind == Kind::Value) {
    return {Source::Value{static_cast<std::size_t>(argument.number)}};
  }
  if (argument.kind != Kind::List) {
    return {constant_of(argument)};
  }
  std::vector<Source> elements;
  for (int64_t element = 0; element < argument.number; ++element) {
    elements.push_back(source_of(arguments, place));
  }
  return {std::move(elements)};
}

// Types. What a program gives is of the types of Python; an operator says by its schema which it takes.

c10::IValue fitted(const c10::IValue& value, const c10::Type& type);

c10::IValue fitted_tensor(const c10::IValue& value) {
  if (value.isTensor() || value.isNone()) {
    return value;
  }
  at::Tensor number = c10::scalar_to_tensor(value.toScalar());
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

template <typename Element, typename Convert>
c10::IValue list_of(const c10::IValue& value, Convert convert) {
  c10::List<Element> list;
  for (const c10::IValue& element : value.toListRef()) {
    list.push_back(convert(element));
  }
  return list;
}

c10::IValue fitted_list(const c10::IValue& value, const c10::TypePtr& element) {
  const auto fit = [&element](const c10::IValue& each) { return fitted(each, *element); };
  switch (element->kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return list_of<int64_t>(value, [&fit](const auto& each) { return fit(each).toInt(); });
    case c10::TypeKind::FloatType:
      return list_of<double>(value, [&fit](const auto& each) { return fit(each).toDouble(); });
    case c10::TypeKind::BoolType:
      return list_of<bool>(value, [&fit](const auto& each) { return fit(each).toBool(); });
    case c10::TypeKind::TensorType:
      return list_of<at::Tensor>(value, [&fit](const auto& each) { return fit(each).toTensor(); });
    case c10::TypeKind::OptionalType:
      return list_of<std::optional<at::Tensor>>(
          value, [&fit](const auto& each) { return fit(each).template to<std::optional<at::Tensor>>(); });
    default:
      refuse("this runtime knows no lists of " + element->str());
  }
}

c10::IValue fitted(const c10::IValue& value, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return value.isNone() ? value : fitted(value, *type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::TensorType:
      return fitted_tensor(value);
    case c10::TypeKind::ListType:
      return fitted_list(value, type.castRaw<c10::ListType>()->getElementType());
    case c10::TypeKind::FloatType:
      return value.isDouble() ? value : c10::IValue(static_cast<double>(value.toInt()));
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return value.isBool() ? c10::IValue(static_cast<int64_t>(value.toBool())) : value;
    default:
      return value;
  }
}

// An argument as its schema takes it. One number stands for each element of a list of fixed length.
c10::IValue fitted(const c10::IValue& value, const c10::Argument& argument) {
  const c10::Type& type = *argument.real_type();
  if (!argument.N() || value.isList() || value.isNone()) {
    return fitted(value, type);
  }
  c10::impl::GenericList list(c10::AnyType::get());
  list.resize(static_cast<std::size_t>(*argument.N()), value);
  return fitted(c10::IValue(list), type);
}

c10::OperatorHandle operator_of(const std::string& name, const std::string& overload) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) {
    refuse("this libtorch has no operator " + name + (overload.empty() ? ".default" : "." + overload));
  }
  return *found;
}

}  // namespace

Kept::Kept(const at::Tensor& tensor) : tensor_(tensor.detach().to(at::kCPU).contiguous()) {
  name_of(tensor_.scalar_type());
}

rust::Str Kept::dtype() const {
  return name_of(tensor_.scalar_type());
}

rust::Slice<const int64_t> Kept::shape() const {
  return {tensor_.sizes().data(), tensor_.sizes().size()};
}

rust::Slice<const uint8_t> Kept::bytes() const {
  return {static_cast<const uint8_t*>(tensor_.const_data_ptr()), tensor_.nbytes()};
}

bool Source::is_known() const {
  return std::holds_alternative<c10::IValue>(what);
}

c10::IValue Source::in(const std::vector<c10::IValue>& values) const {
  if (const auto* value = std::get_if<Value>(&what)) {
    return values[value->number];
  }
  if (const auto* constant = std::get_if<c10::IValue>(&what)) {
    return *constant;
  }
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Source& element : std::get<std::vector<Source>>(what)) {
    list.push_back(element.in(values));
  }
  return list;
}

Program::Program(
    rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
    rust::Slice<const Argument> outputs)
    : inputs_(inputs) {
  for (const View& view : state) {
    state_.push_back(copy_of(view));
  }
  for (const Call& call : calls) {
    steps_.push_back(told(std::string(call.name), [&] { return step_of(call); }));
  }
  std::size_t place = 0;
  outputs_ = source_of(outputs, place);
  find_ends();
}

Program::Step Program::step_of(const Call& call) const {
  const std::string name(call.name), overload(call.overload);
  const rust::Slice<const Argument> given(call.arguments.data(), call.arguments.size());
  std::size_t place = 0;
  std::vector<Source> arguments;
  for (std::size_t each = 0; each < call.positional; ++each) {
    arguments.push_back(source_of(given, place));
  }
  if (const SizeFunction function = size_function(name)) {
    return {name, function, std::move(arguments), {}};
  }
  std::unordered_map<std::string, Source> by_name;
  for (const rust::String& key : call.keys) {
    by_name.emplace(std::string(key), source_of(given, place));
  }
  const c10::OperatorHandle found = operator_of(name, overload);
  const auto& schema = found.schema();
  if (arguments.size() > schema.arguments().size()) {
    refuse("it takes " + std::to_string(schema.arguments().size()) + " arguments, the program gives more");
  }
  for (std::size_t each = arguments.size(); each < schema.arguments().size(); ++each) {
    const c10::Argument& argument = schema.arguments()[each];
    if (auto named = by_name.extract(argument.name())) {
      arguments.push_back(std::move(named.mapped()));
    } else if (argument.default_value()) {
      arguments.push_back({*argument.default_value()});
    } else {
      refuse("the program gives no argument " + argument.name());
    }
  }
  if (!by_name.empty()) {
    refuse("it has no argument " + by_name.begin()->first);
  }
  for (std::size_t each = 0; each < arguments.size(); ++each) {
    if (auto* constant = std::get_if<c10::IValue>(&arguments[each].what)) {
      *constant = fitted(*constant, schema.arguments()[each]);
    }
  }
  return {name, found, std::move(arguments), {}};
}

// For each step the values that it reads last, so that their memory can be used again.
void Program::find_ends() {
  const std::size_t first = state_.size() + inputs_;
  std::unordered_map<std::size_t, std::size_t> last;
  const auto read = [&](const auto& self, const Source& source, std::size_t step) -> void {
    if (const auto* value = std::get_if<Source::Value>(&source.what)) {
      last[value->number] = step;
    } else if (const auto* elements = std::get_if<std::vector<Source>>(&source.what)) {
      for (const Source& element : *elements) {
        self(self, element, step);
      }
    }
  };
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    last[first + step] = step;
    for (const Source& argument : steps_[step].arguments) {
      read(read, argument, step);
    }
  }
  read(read, outputs_, steps_.size());
  for (const auto& [value, step] : last) {
    if (value >= first && step < steps_.size()) {
      steps_[step].ended.push_back(value);
    }
  }
}

c10::IValue Program::Step::run(const std::vector<c10::IValue>& values) const {
  std::vector<c10::IValue> stack;
  stack.reserve(arguments.size());
  if (const auto* of_sizes = std::get_if<SizeFunction>(&function)) {
    for (const Source& argument : arguments) {
      stack.push_back(argument.in(values));
    }
    return (*of_sizes)(stack);
  }
  const auto& handle = std::get<c10::OperatorHandle>(function);
  for (std::size_t each = 0; each < arguments.size(); ++each) {
    const Source& argument = arguments[each];
    // What is known was fitted before.
    stack.push_back(
        argument.is_known() ? argument.in(values) : fitted(argument.in(values), handle.schema().arguments()[each]));
  }
  handle.callBoxed(stack);
  if (stack.size() == 1) {
    return std::move(stack.front());
  }
  return stack.empty() ? c10::IValue() : c10::IValue(c10::ivalue::Tuple::create(std::move(stack)));
}

std::unique_ptr<Given> Program::run(rust::Slice<const View> inputs) const {
  const at::NoGradGuard no_gradients;
  std::vector<c10::IValue> values(state_.begin(), state_.end());
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
    const c10::IValue outputs = outputs_.in(values);
    std::vector<Kept> given;
    for (const c10::IValue& output : outputs.toListRef()) {
      given.emplace_back(output.toTensor());
    }
    return std::make_unique<Given>(std::move(given));
  });
}

std::unique_ptr<Program> new_program(
    rust::Slice<const View> state, std::size_t inputs, rust::Slice<const Call> calls,
    rust::Slice<const Argument> outputs) {
  return std::make_unique<Program>(state, inputs, calls, outputs);
}

bool has_operators() {
  return c10::Dispatcher::singleton().findSchema({"recstore::emb_read", "table"}).has_value();
}

void set_num_threads(std::size_t threads) {
  at::set_num_threads(static_cast<int>(threads));
}

}  // namespace recstore::runtime
