// What Rust calls in C++. See ops.cpp.
#pragma once

#include <cstddef>

namespace recstore {

struct Task;

void parallel_for(std::size_t count, const Task& task);
void register_ops();

}  // namespace recstore
