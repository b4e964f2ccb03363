// Every type of an argument that operators of the list take is here; what has none is refused when the bundle is opened.

#include "recstore-runtime/cpp/arguments.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/ScalarOps.h>

#include "recstore-runtime/cpp/tensors.h"
#include "recstore-runtime/src/program.rs.h"

namespace recstore::runtime {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::runtime_error(message);
}

// Constants that have names.

const char* word_of(Kind kind) {
  switch (kind) {
    case Kind::DType:
      return "dtype";
    case Kind::Device:
      return "device";
    case Kind::Layout:
      return "layout";
    case Kind::MemoryFormat:
      return "memory_format";
    default:
      return nullptr;
  }
}

c10::IValue named(Kind kind, const std::string& name) {
  static const std::unordered_map<std::string, c10::MemoryFormat> formats = {
      {"contiguous_format", c10::MemoryFormat::Contiguous},
      {"preserve_format", c10::MemoryFormat::Preserve},
      {"channels_last", c10::MemoryFormat::ChannelsLast},
      {"channels_last_3d", c10::MemoryFormat::ChannelsLast3d},
  };
  if (kind == Kind::DType) {
    return type_of(name);
  }
  if (kind == Kind::Device && name == "cpu") {
    return c10::Device(c10::kCPU);
  }
  if (kind == Kind::Layout && name == "strided") {
    return c10::kStrided;
  }
  if (const auto found = formats.find(name); kind == Kind::MemoryFormat && found != formats.end()) {
    return found->second;
  }
  refuse(std::string("this runtime knows no ") + word_of(kind) + " " + name);
}

// The kind of the constants that a type of a schema takes, if they have names.
std::optional<Kind> named_kind(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::ScalarTypeType:
      return Kind::DType;
    case c10::TypeKind::DeviceObjType:
      return Kind::Device;
    case c10::TypeKind::LayoutType:
      return Kind::Layout;
    case c10::TypeKind::MemoryFormatType:
      return Kind::MemoryFormat;
    default:
      return std::nullopt;
  }
}

// Values, as types of schemas take them.

[[noreturn]] void unfit(const c10::IValue& value, const c10::Type& type) {
  refuse("expected " + type.str() + ", got " + value.tagKind());
}

c10::IValue tensor_of(const c10::IValue& value, const c10::Type& type) {
  if (value.isTensor() && value.toTensor().defined()) {
    return value;
  }
  if (!value.isInt() && !value.isDouble() && !value.isBool()) {
    unfit(value, type);
  }
  at::Tensor number = c10::scalar_to_tensor(value.toScalar());
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

c10::IValue scalar_of(const c10::IValue& value, const c10::Type& type) {
  const c10::TypeKind kind = type.kind();
  const bool is_whole = value.isInt() || value.isBool();
  if (kind == c10::TypeKind::NumberType && (is_whole || value.isDouble())) {
    return value;
  }
  if (kind == c10::TypeKind::FloatType && (is_whole || value.isDouble())) {
    return value.isDouble() ? value : c10::IValue(static_cast<double>(value.toScalar().toLong()));
  }
  if ((kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType) && is_whole) {
    return value.toScalar().toLong();
  }
  if ((kind == c10::TypeKind::BoolType && value.isBool()) || (kind == c10::TypeKind::StringType && value.isString())) {
    return value;
  }
  unfit(value, type);
}

template <typename Element, typename Convert>
c10::IValue list_of(const std::vector<c10::IValue>& elements, Convert convert) {
  c10::List<Element> list;
  list.reserve(elements.size());
  for (const c10::IValue& element : elements) {
    list.push_back(convert(element));
  }
  return list;
}

// A list of elements that fit their type.
c10::IValue typed_list(const std::vector<c10::IValue>& elements, const c10::Type& element) {
  switch (element.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return list_of<int64_t>(elements, [](const c10::IValue& each) { return each.toInt(); });
    case c10::TypeKind::FloatType:
      return list_of<double>(elements, [](const c10::IValue& each) { return each.toDouble(); });
    case c10::TypeKind::BoolType:
      return list_of<bool>(elements, [](const c10::IValue& each) { return each.toBool(); });
    case c10::TypeKind::TensorType:
      return list_of<at::Tensor>(elements, [](const c10::IValue& each) { return each.toTensor(); });
    case c10::TypeKind::OptionalType:
      return list_of<std::optional<at::Tensor>>(
          elements, [](const c10::IValue& each) { return each.to<std::optional<at::Tensor>>(); });
    default:
      refuse("this runtime knows no lists of " + element.str());
  }
}

c10::IValue fitted_value(const c10::IValue& value, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType: {
      const bool is_nothing = value.isNone() || (value.isTensor() && !value.toTensor().defined());
      return is_nothing ? c10::IValue() : fitted_value(value, *type.castRaw<c10::OptionalType>()->getElementType());
    }
    case c10::TypeKind::ListType: {
      if (!value.isList()) {
        unfit(value, type);
      }
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      std::vector<c10::IValue> elements;
      for (const c10::IValue& each : value.toList()) {
        elements.push_back(fitted_value(each, element));
      }
      return typed_list(elements, element);
    }
    case c10::TypeKind::TensorType:
      return tensor_of(value, type);
    default:
      return scalar_of(value, type);
  }
}

c10::IValue fitted_constant(const Source::Constant& constant, const c10::Type& type) {
  if (type.kind() == c10::TypeKind::OptionalType && constant.kind != Kind::Nothing) {
    return fitted_constant(constant, *type.castRaw<c10::OptionalType>()->getElementType());
  }
  const std::optional<Kind> expected = named_kind(type);
  if (!expected && !word_of(constant.kind)) {
    return fitted_value(constant.value, type);
  }
  if (expected != constant.kind) {
    refuse("expected " + type.str() + ", got " + (word_of(constant.kind) ? word_of(constant.kind) : constant.value.tagKind()));
  }
  return named(constant.kind, constant.value.toStringRef());
}

c10::IValue fitted_source(const Source& source, const c10::Type& type, const Values& values) {
  if (const auto* known = std::get_if<c10::IValue>(&source.what)) {
    return *known;
  }
  if (const auto* value = std::get_if<Source::Value>(&source.what)) {
    return fitted_value(values[value->number], type);
  }
  if (const auto* constant = std::get_if<Source::Constant>(&source.what)) {
    return fitted_constant(*constant, type);
  }
  if (type.kind() == c10::TypeKind::OptionalType) {
    return fitted_source(source, *type.castRaw<c10::OptionalType>()->getElementType(), values);
  }
  if (type.kind() != c10::TypeKind::ListType) {
    refuse("expected " + type.str() + ", got a list");
  }
  const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
  std::vector<c10::IValue> elements;
  for (const Source& each : std::get<std::vector<Source>>(source.what)) {
    elements.push_back(fitted_source(each, element, values));
  }
  return typed_list(elements, element);
}

bool reads_values(const Source& source) {
  bool reads = false;
  each_value(source, [&reads](std::size_t) { reads = true; });
  return reads;
}

// Rules by the names of arguments.

bool is_constant(const Source& source, bool (*is)(const c10::IValue&)) {
  const auto* known = std::get_if<c10::IValue>(&source.what);
  return known != nullptr && is(*known);
}

bool is_null(const Source& source) {
  return is_constant(source, [](const c10::IValue& value) { return value.isNone(); });
}

bool is_off(const Source& source) {
  return is_null(source) || is_constant(source, [](const c10::IValue& value) { return value.isBool() && !value.toBool(); });
}

bool is_zero(const Source& source) {
  return is_constant(source, [](const c10::IValue& value) { return value.isDouble() && value.toDouble() == 0; });
}

bool takes_tensors(const c10::Argument& argument) {
  const c10::Type& type = *argument.type();
  const bool is_list = type.kind() == c10::TypeKind::ListType;
  const c10::Type& element = is_list ? *type.castRaw<c10::ListType>()->getElementType() : type;
  return element.kind() == c10::TypeKind::TensorType;
}

bool takes_tables(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  const bool is_named = argument.name() == "table" || argument.name() == "tables";
  return is_named && takes_tensors(argument) && schema.name().rfind("recstore::", 0) == 0;
}

// Whether a source is values of the program and nothing else.
bool is_of_values(const Source& source) {
  if (const auto* elements = std::get_if<std::vector<Source>>(&source.what)) {
    return std::all_of(elements->begin(), elements->end(), is_of_values);
  }
  return std::holds_alternative<Source::Value>(source.what);
}

// Whether it has no statistics that it could write: then those of its inputs are pure.
bool has_no_statistics(const c10::FunctionSchema& schema, const std::vector<Source>& arguments) {
  bool has_none = false;
  for (const char* name : {"running_mean", "running_var"}) {
    const std::optional<int> place = schema.argumentIndexWithName(name);
    has_none = place && is_null(arguments[static_cast<std::size_t>(*place)]);
    if (!has_none) {
      break;
    }
  }
  return has_none;
}

// What schemas do not say: that an operator draws random numbers, or writes statistics, for some arguments.
void check_only_computes(const c10::FunctionSchema& schema, const std::vector<Source>& arguments, std::size_t place) {
  const std::string& name = schema.arguments()[place].name();
  if (name == "dropout_p" && !is_zero(arguments[place])) {
    refuse("argument dropout_p must be the constant 0");
  }
  if (is_off(arguments[place])) {
    return;
  }
  if (name == "insert" || name == "train" || name == "pin_memory") {
    refuse("argument " + name + " must be the constant false");
  }
  if ((name == "training" || name == "use_input_stats") && !has_no_statistics(schema, arguments)) {
    refuse("argument " + name + " must be the constant false beside running statistics");
  }
}

}  // namespace

Source Source::read(rust::Slice<const Argument> arguments, std::size_t& place) {
  const Argument& argument = arguments[place++];
  switch (argument.kind) {
    case Kind::Nothing:
      return {Constant{argument.kind, c10::IValue()}};
    case Kind::Bool:
      return {Constant{argument.kind, argument.number != 0}};
    case Kind::Int:
      return {Constant{argument.kind, argument.number}};
    case Kind::Float:
      return {Constant{argument.kind, argument.real}};
    case Kind::Value:
      return {Value{static_cast<std::size_t>(argument.number)}};
    case Kind::List: {
      std::vector<Source> elements;
      for (int64_t element = 0; element < argument.number; ++element) {
        elements.push_back(read(arguments, place));
      }
      return {std::move(elements)};
    }
    default:
      return {Constant{argument.kind, std::string(argument.text)}};
  }
}

std::vector<Source> arranged(
    const c10::FunctionSchema& schema, std::vector<Source> by_place, rust::Slice<const rust::String> keys,
    std::vector<Source> by_name) {
  std::vector<Source> arguments = std::move(by_place);
  const std::size_t given = arguments.size();
  const auto is_by_place = [](const c10::Argument& argument) { return !argument.kwarg_only(); };
  const auto places = static_cast<std::size_t>(
      std::count_if(schema.arguments().begin(), schema.arguments().end(), is_by_place));
  if (given > places) {
    refuse("it takes " + std::to_string(places) + " arguments by place, the graph gives " + std::to_string(given));
  }
  std::unordered_map<std::string, Source> named;
  for (std::size_t each = 0; each < keys.size(); ++each) {
    named.emplace(std::string(keys[each]), std::move(by_name[each]));
  }
  for (std::size_t each = given; each < schema.arguments().size(); ++each) {
    const c10::Argument& argument = schema.arguments()[each];
    if (auto found = named.extract(argument.name())) {
      arguments.push_back(std::move(found.mapped()));
    } else if (argument.default_value()) {
      arguments.push_back({*argument.default_value()});
    } else {
      refuse("the graph gives no argument " + argument.name());
    }
  }
  if (!named.empty()) {
    refuse("it has no argument " + named.begin()->first + " by name");
  }
  for (std::size_t each = 0; each < arguments.size(); ++each) {
    if (!reads_values(arguments[each])) {
      arguments[each] = {fitted(arguments[each], schema.arguments()[each], {})};
    }
  }
  return arguments;
}

void check_rules(
    const c10::FunctionSchema& schema, const std::vector<Source>& arguments, const std::vector<bool>& is_handle,
    bool is_listed) {
  if (schema.is_mutable()) {
    refuse("it writes to its arguments");
  }
  for (std::size_t each = 0; each < arguments.size(); ++each) {
    const c10::Argument& argument = schema.arguments()[each];
    const bool takes_handles = takes_tables(schema, argument);
    bool fits = !takes_handles || is_of_values(arguments[each]);
    each_value(arguments[each], [&](std::size_t number) {
      fits = fits && (number < is_handle.size() && is_handle[number]) == takes_handles;
    });
    if (!fits) {
      refuse("argument " + argument.name() + (takes_handles ? " must be" : " must not be") + " a table of the bundle");
    }
    if (is_listed) {
      check_only_computes(schema, arguments, each);
    }
  }
}

c10::IValue fitted(const Source& source, const c10::Argument& argument, const Values& values) {
  const auto is_number = [&] {
    if (const auto* value = std::get_if<Source::Value>(&source.what)) {
      const c10::IValue& found = values[value->number];
      return found.isInt() || found.isDouble() || found.isBool();
    }
    const auto* constant = std::get_if<Source::Constant>(&source.what);
    return constant != nullptr && constant->kind != Kind::Nothing;
  };
  try {
    // One number stands for each element of a list of fixed length.
    if (argument.N() && is_number()) {
      const Source repeated{std::vector<Source>(static_cast<std::size_t>(*argument.N()), source)};
      return fitted_source(repeated, *argument.real_type(), values);
    }
    return fitted_source(source, *argument.real_type(), values);
  } catch (const std::exception& error) {
    refuse("argument " + argument.name() + ": " + error.what());
  }
}

c10::IValue plain(const Source& source, const Values& values) {
  if (const auto* value = std::get_if<Source::Value>(&source.what)) {
    return values[value->number];
  }
  const auto* constant = std::get_if<Source::Constant>(&source.what);
  const bool is_number = constant != nullptr &&
      (constant->kind == Kind::Int || constant->kind == Kind::Bool || constant->kind == Kind::Float);
  return is_number ? constant->value : throw std::runtime_error("it takes numbers alone");
}

}  // namespace recstore::runtime
