// What Rust calls in C++. See ops.cpp.
#pragma once

#include <cstddef>

namespace recstore {

struct Task;

void parallel_for(std::size_t count, const Task& task);
std::size_t num_threads();
void register_ops();

}  // namespace recstore
