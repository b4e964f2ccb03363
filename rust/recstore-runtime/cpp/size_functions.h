// Python's functions on sizes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace recstore::runtime {

struct SizeFunction {
  std::size_t arity;
  c10::IValue (*apply)(const std::vector<c10::IValue>& given);

  // The result for as many arguments as it takes. Throws where Python raises, and for a result of more than 64 bits.
  c10::IValue operator()(const std::vector<c10::IValue>& given) const;
};

// The function of a name of Python, null for none.
const SizeFunction* size_function(const std::string& name);

}  // namespace recstore::runtime
