// The arguments of a program's calls: what a graph says, as the schema of the operator takes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include "rust/cxx.h"

namespace recstore::runtime {

enum class Kind : std::uint8_t;
struct Argument;

using Values = std::vector<c10::IValue>;

// Where an argument comes from.
struct Source {
  // What the graph says. The names of types, devices, layouts and memory formats are texts of their kinds.
  struct Constant {
    Kind kind;
    c10::IValue value;
  };
  // A value of the program, by its number.
  struct Value {
    std::size_t number;
  };
  // A constant as a schema takes it, one that nothing has looked at, a value, or a list with such in it.
  std::variant<c10::IValue, Constant, Value, std::vector<Source>> what;

  // Reads one argument from `place` on, which is then behind it: the elements of a list follow it.
  static Source read(rust::Slice<const Argument> arguments, std::size_t& place);
};

// Calls a function with the number of each value that a source reads.
template <typename Function>
void each_value(const Source& source, const Function& function) {
  if (const auto* value = std::get_if<Source::Value>(&source.what)) {
    function(value->number);
  } else if (const auto* elements = std::get_if<std::vector<Source>>(&source.what)) {
    for (const Source& element : *elements) {
      each_value(element, function);
    }
  }
}

// The arguments of a schema: those given by place, by name, and defaults. What is known before a run is as the schema
// takes it. Throws if the graph gives others, or other constants.
std::vector<Source> arranged(
    const c10::FunctionSchema& schema, std::vector<Source> by_place, rust::Slice<const rust::String> keys,
    std::vector<Source> by_name);

// Throws if an operator writes to its arguments, or if these break the rules for their names: tables are values of the
// state of which `is_handle` says so, and they alone. The list of operators says what holds for those that are listed.
void check_rules(
    const c10::FunctionSchema& schema, const std::vector<Source>& arguments, const std::vector<bool>& is_handle,
    bool is_listed);

// An argument of a run, as its schema takes it.
c10::IValue fitted(const Source& source, const c10::Argument& argument, const Values& values);

// An argument of a function on sizes.
c10::IValue plain(const Source& source, const Values& values);

}  // namespace recstore::runtime
