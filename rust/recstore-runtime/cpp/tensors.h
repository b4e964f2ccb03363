// The tensors that programs may have, and how they come in and go out.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace recstore::runtime {

struct View;

// The type of a name of torch. Throws for those that no program may name.
at::ScalarType type_of(const std::string& name);

// The name of the type of a tensor that is given out. Throws for others.
const std::string& name_of(at::ScalarType type);

// A tensor with the bytes of a view, in memory of its own.
at::Tensor copy_of(const View& view);

// A tensor over the bytes of a view if they are aligned as those of libtorch, and else a copy.
at::Tensor input_of(const View& view);

// Throws if a value, or one within it, is anything but a number or a dense tensor of the CPU within its own storage.
void check_value(const c10::IValue& value);

// The elements that a tensor stands for, one behind the other.
at::Tensor materialized(const c10::IValue& value);

// The tensor itself, or a copy if anything else holds its memory.
at::Tensor owned(at::Tensor tensor);

}  // namespace recstore::runtime
