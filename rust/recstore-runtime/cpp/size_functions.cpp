// Python's functions on sizes, which exported programs call between operators: on ints, floats and bools, as Python does.

#include "recstore-runtime/cpp/program.h"

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace recstore::runtime {

namespace {

using Arguments = std::vector<c10::IValue>;

bool is_whole(const c10::IValue& value) {
  return value.isInt() || value.isBool();
}

int64_t whole(const c10::IValue& value) {
  return value.isBool() ? static_cast<int64_t>(value.toBool()) : value.toInt();
}

double real(const c10::IValue& value) {
  return value.isDouble() ? value.toDouble() : static_cast<double>(whole(value));
}

// Applies one function to whole numbers, and another where either is none.
template <typename Whole, typename Real>
c10::IValue apply(const Arguments& arguments, Whole of_whole, Real of_real) {
  const c10::IValue &left = arguments.at(0), &right = arguments.at(1);
  if (is_whole(left) && is_whole(right)) {
    return of_whole(whole(left), whole(right));
  }
  return of_real(real(left), real(right));
}

template <typename Function>
c10::IValue apply(const Arguments& arguments, Function function) {
  return apply(arguments, function, function);
}

void check_divisor(bool is_zero) {
  if (is_zero) {
    throw std::domain_error("division of a size by zero");
  }
}

// The remainder has the sign of the divisor.
template <typename Number>
Number modulo(Number left, Number right) {
  check_divisor(right == 0);
  if constexpr (std::is_integral_v<Number>) {
    const Number rest = left % right;
    return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
  } else {
    const Number rest = std::fmod(left, right);
    return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
  }
}

c10::IValue floor_divided(const Arguments& arguments) {
  return apply(
      arguments,
      [](int64_t left, int64_t right) {
        const int64_t rest = modulo(left, right);
        return (left - rest) / right;
      },
      [](double left, double right) {
        check_divisor(right == 0);
        return std::floor(left / right);
      });
}

c10::IValue divided(const Arguments& arguments) {
  check_divisor(real(arguments.at(1)) == 0);
  return real(arguments.at(0)) / real(arguments.at(1));
}

c10::IValue item(const Arguments& arguments) {
  const c10::IValue& container = arguments.at(0);
  const auto place = static_cast<std::size_t>(arguments.at(1).toInt());
  return container.isTuple() ? container.toTupleRef().elements().at(place) : container.toList().get(place);
}

const std::unordered_map<std::string, SizeFunction> kFunctions = {
    {"operator.add", [](const Arguments& given) { return apply(given, [](auto a, auto b) { return a + b; }); }},
    {"operator.sub", [](const Arguments& given) { return apply(given, [](auto a, auto b) { return a - b; }); }},
    {"operator.mul", [](const Arguments& given) { return apply(given, [](auto a, auto b) { return a * b; }); }},
    {"operator.floordiv", floor_divided},
    {"operator.truediv", divided},
    {"operator.mod", [](const Arguments& given) { return apply(given, [](auto a, auto b) { return modulo(a, b); }); }},
    {"operator.neg",
     [](const Arguments& given) {
       const c10::IValue& value = given.at(0);
       return is_whole(value) ? c10::IValue(-whole(value)) : c10::IValue(-real(value));
     }},
    {"operator.eq", [](const Arguments& given) { return apply(given, std::equal_to<>()); }},
    {"operator.ne", [](const Arguments& given) { return apply(given, std::not_equal_to<>()); }},
    {"operator.lt", [](const Arguments& given) { return apply(given, std::less<>()); }},
    {"operator.le", [](const Arguments& given) { return apply(given, std::less_equal<>()); }},
    {"operator.gt", [](const Arguments& given) { return apply(given, std::greater<>()); }},
    {"operator.ge", [](const Arguments& given) { return apply(given, std::greater_equal<>()); }},
    {"operator.getitem", item},
    {"torch.sym_max", [](const Arguments& given) { return apply(given, [](auto a, auto b) { return b > a ? b : a; }); }},
    {"torch.sym_min", [](const Arguments& given) { return apply(given, [](auto a, auto b) { return b < a ? b : a; }); }},
    {"torch.sym_not", [](const Arguments& given) { return c10::IValue(real(given.at(0)) == 0); }},
    {"torch.sym_int", [](const Arguments& given) { return c10::IValue(static_cast<int64_t>(real(given.at(0)))); }},
    {"torch.sym_float", [](const Arguments& given) { return c10::IValue(real(given.at(0))); }},
};

}  // namespace

SizeFunction size_function(const std::string& name) {
  const auto found = kFunctions.find(name);
  return found == kFunctions.end() ? nullptr : found->second;
}

}  // namespace recstore::runtime
