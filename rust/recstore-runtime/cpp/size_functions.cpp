// Python's functions on sizes, which exported programs call between operators: on ints, floats and bools, with the
// results of Python. Its ints have no bound, sizes have 64 bits: a result beyond these is an error.

#include "recstore-runtime/cpp/size_functions.h"

#include <bit>
#include <cmath>
#include <compare>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <unordered_map>

namespace recstore::runtime {

namespace {

using Arguments = std::vector<c10::IValue>;

[[noreturn]] void refuse(const std::string& message) {
  throw std::runtime_error(message);
}

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
c10::IValue apply(const Arguments& given, Whole of_whole, Real of_real) {
  if (is_whole(given[0]) && is_whole(given[1])) {
    return of_whole(whole(given[0]), whole(given[1]));
  }
  return of_real(real(given[0]), real(given[1]));
}

// Applies one of the compiler's functions that say whether the result has more bits than its type.
template <bool (*Checked)(int64_t, int64_t, int64_t&)>
c10::IValue within(int64_t left, int64_t right) {
  int64_t result = 0;
  if (Checked(left, right, result)) {
    refuse("the result has more than 64 bits");
  }
  return result;
}

bool add_overflows(int64_t left, int64_t right, int64_t& result) {
  return __builtin_add_overflow(left, right, &result);
}

bool subtract_overflows(int64_t left, int64_t right, int64_t& result) {
  return __builtin_sub_overflow(left, right, &result);
}

bool multiply_overflows(int64_t left, int64_t right, int64_t& result) {
  return __builtin_mul_overflow(left, right, &result);
}

c10::IValue sum(const Arguments& given) {
  return apply(given, within<add_overflows>, std::plus<double>());
}

c10::IValue difference(const Arguments& given) {
  return apply(given, within<subtract_overflows>, std::minus<double>());
}

c10::IValue product(const Arguments& given) {
  return apply(given, within<multiply_overflows>, std::multiplies<double>());
}

c10::IValue negated(const Arguments& given) {
  return is_whole(given[0]) ? difference({c10::IValue(0), given[0]}) : c10::IValue(-given[0].toDouble());
}

// Divisions. The remainder has the sign of the divisor, and quotients are rounded down.

template <typename Number>
void check_divisor(Number divisor) {
  if (divisor == 0) {
    refuse("division by zero");
  }
}

int64_t whole_remainder(int64_t left, int64_t right) {
  check_divisor(right);
  // The processor divides before it knows the remainder, and the smallest number has no quotient by -1.
  const int64_t rest = right == -1 ? 0 : left % right;
  return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

c10::IValue whole_quotient(int64_t left, int64_t right) {
  check_divisor(right);
  if (right == -1) {
    return difference({c10::IValue(0), c10::IValue(left)});
  }
  return left / right - (left % right != 0 && (left < 0) != (right < 0));
}

// As `float_rem` of CPython: a remainder of zero has the sign of the divisor too.
double real_remainder(double left, double right) {
  check_divisor(right);
  const double rest = std::fmod(left, right);
  if (rest == 0) {
    return std::copysign(0.0, right);
  }
  return (rest < 0) != (right < 0) ? rest + right : rest;
}

// As `float_floor_div` of CPython: by the exact remainder, since the rounded quotient can lie above the true one.
double real_quotient(double left, double right) {
  check_divisor(right);
  const double rest = std::fmod(left, right);
  double quotient = (left - rest) / right;
  if (rest != 0 && (rest < 0) != (right < 0)) {
    quotient -= 1;
  }
  if (quotient == 0) {
    return std::copysign(0.0, left / right);
  }
  const double below = std::floor(quotient);
  return quotient - below > 0.5 ? below + 1 : below;
}

c10::IValue remainder(const Arguments& given) {
  return apply(given, whole_remainder, real_remainder);
}

c10::IValue floor_quotient(const Arguments& given) {
  return apply(given, whole_quotient, real_quotient);
}

uint64_t magnitude(int64_t number) {
  return number < 0 ? 0 - static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
}

// The float next to a quotient of whole numbers: the quotient of their floats can be another.
double true_quotient(int64_t left, int64_t right) {
  check_divisor(right);
  __extension__ using Wide = unsigned __int128;
  const uint64_t above = magnitude(left), below = magnitude(right);
  if (above == 0) {
    return right < 0 ? -0.0 : 0.0;
  }
  // At least 64 bits of the quotient, of which the last says too whether more follow: enough to round once.
  const int shift = 64 + std::bit_width(below) - std::bit_width(above);
  const Wide shifted = static_cast<Wide>(above) << shift;
  const Wide quotient = shifted / below | (shifted % below != 0);
  const double result = std::ldexp(static_cast<double>(quotient), -shift);
  return (left < 0) != (right < 0) ? -result : result;
}

c10::IValue quotient(const Arguments& given) {
  return apply(given, true_quotient, [](double left, double right) {
    check_divisor(right);
    return left / right;
  });
}

// Comparisons are exact, also of a whole number that no float equals with a float.

std::partial_ordering compare(int64_t left, double right) {
  if (std::isnan(right)) {
    return std::partial_ordering::unordered;
  }
  constexpr double kBound = 0x1p63;
  if (right >= kBound || right < -kBound) {
    return 0.0 <=> right;
  }
  const double trunc = std::trunc(right);
  const auto by_whole = left <=> static_cast<int64_t>(trunc);
  return by_whole != 0 ? std::partial_ordering(by_whole) : trunc <=> right;
}

std::partial_ordering compare(const c10::IValue& left, const c10::IValue& right) {
  if (is_whole(left)) {
    return is_whole(right) ? whole(left) <=> whole(right) : compare(whole(left), right.toDouble());
  }
  if (is_whole(right)) {
    return 0 <=> compare(whole(right), left.toDouble());
  }
  return left.toDouble() <=> right.toDouble();
}

// Python's `max` and `min` give the first unless the second is beyond it; torch makes a float of it if either is one.
c10::IValue chosen(const Arguments& given, bool is_second) {
  const c10::IValue& result = given[is_second];
  return is_whole(given[0]) && is_whole(given[1]) ? result : c10::IValue(real(result));
}

c10::IValue truncated(const Arguments& given) {
  if (is_whole(given[0])) {
    return whole(given[0]);
  }
  const double trunc = std::trunc(given[0].toDouble());
  if (!(trunc >= -0x1p63 && trunc < 0x1p63)) {
    refuse(std::isfinite(trunc) ? "the result has more than 64 bits" : "there is no such integer");
  }
  return static_cast<int64_t>(trunc);
}

c10::IValue item(const Arguments& given) {
  const c10::IValue& container = given[0];
  if ((!container.isTuple() && !container.isList()) || !is_whole(given[1])) {
    refuse("it takes a list and the place of an element");
  }
  const std::size_t size =
      container.isTuple() ? container.toTupleRef().elements().size() : container.toList().size();
  const auto count = static_cast<int64_t>(size);
  const int64_t wanted = whole(given[1]), place = wanted < 0 ? wanted + count : wanted;
  if (place < 0 || place >= count) {
    refuse("element " + std::to_string(wanted) + " of " + std::to_string(count));
  }
  const auto found = static_cast<std::size_t>(place);
  return container.isTuple() ? container.toTupleRef().elements()[found] : container.toList().get(found);
}

#define RECSTORE_COMPARISON(compares) \
  [](const Arguments& given) { return c10::IValue(compare(given[0], given[1]) compares 0); }

const std::unordered_map<std::string, SizeFunction> kFunctions = {
    {"operator.add", {2, sum}},
    {"operator.sub", {2, difference}},
    {"operator.mul", {2, product}},
    {"operator.floordiv", {2, floor_quotient}},
    {"operator.truediv", {2, quotient}},
    {"operator.mod", {2, remainder}},
    {"operator.neg", {1, negated}},
    {"operator.eq", {2, RECSTORE_COMPARISON(==)}},
    {"operator.ne", {2, RECSTORE_COMPARISON(!=)}},
    {"operator.lt", {2, RECSTORE_COMPARISON(<)}},
    {"operator.le", {2, RECSTORE_COMPARISON(<=)}},
    {"operator.gt", {2, RECSTORE_COMPARISON(>)}},
    {"operator.ge", {2, RECSTORE_COMPARISON(>=)}},
    {"operator.getitem", {2, item}},
    {"torch.sym_max", {2, [](const Arguments& given) { return chosen(given, compare(given[1], given[0]) > 0); }}},
    {"torch.sym_min", {2, [](const Arguments& given) { return chosen(given, compare(given[1], given[0]) < 0); }}},
    {"torch.sym_not", {1, [](const Arguments& given) { return c10::IValue(real(given[0]) == 0); }}},
    {"torch.sym_int", {1, truncated}},
    {"torch.sym_float", {1, [](const Arguments& given) { return c10::IValue(real(given[0])); }}},
};

#undef RECSTORE_COMPARISON

}  // namespace

const SizeFunction* size_function(const std::string& name) {
  const auto found = kFunctions.find(name);
  return found == kFunctions.end() ? nullptr : &found->second;
}

c10::IValue SizeFunction::operator()(const std::vector<c10::IValue>& given) const {
  if (apply != item) {
    for (const c10::IValue& value : given) {
      if (!is_whole(value) && !value.isDouble()) {
        refuse("it takes numbers, got " + value.tagKind());
      }
    }
  }
  return apply(given);
}

}  // namespace recstore::runtime
