// Runs the bundles of a list in C++ and shows what they gave; tests/python/graph_programs.py says how files lie.
//
// Each is asked three times, of buffers that are aligned as those of libtorch or not. What it gave must be the same, and
// stay so when inputs are overwritten and freed and other outputs are written to.

#include <recstore_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Bundle = std::unique_ptr<recstore_bundle, decltype(&recstore_bundle_close)>;
using Outputs = std::unique_ptr<recstore_outputs, decltype(&recstore_outputs_free)>;

constexpr std::size_t kAlignment = 64;

// What a test must not see, as opposed to what a bundle may refuse.
[[noreturn]] void broken(const std::string& what) {
  std::cout << "broken: " << what << std::endl;
  std::exit(3);
}

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    broken("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// A tensor of a file: the number of its type, how many sizes, these, and its elements.
class Stored {
 public:
  explicit Stored(const std::string& path) : file_(read(path)) {
    std::int64_t head[2];
    std::memcpy(head, file_.data(), sizeof(head));
    dtype_ = static_cast<int>(head[0]);
    shape_.resize(static_cast<std::size_t>(head[1]));
    std::memcpy(shape_.data(), file_.data() + sizeof(head), shape_.size() * sizeof(std::int64_t));
    start_ = sizeof(head) + shape_.size() * sizeof(std::int64_t);
  }

  std::size_t bytes() const {
    return file_.size() - start_;
  }
  const char* data() const {
    return file_.data() + start_;
  }
  recstore_tensor over(const void* memory) const {
    return {nullptr, dtype_, shape_.size(), shape_.data(), memory, bytes()};
  }

 private:
  std::vector<char> file_;
  int dtype_;
  std::vector<std::int64_t> shape_;
  std::size_t start_;
};

// Memory of exactly so many bytes behind `skip`, which is overwritten before it is freed.
class Buffer {
 public:
  Buffer(const Stored& stored, std::size_t skip) : bytes_(stored.bytes()), skip_(skip) {
    if (posix_memalign(&memory_, kAlignment, bytes_ + skip_) != 0) {
      broken("no memory");
    }
    if (bytes_ != 0) {
      std::memcpy(data(), stored.data(), bytes_);
    }
  }
  ~Buffer() {
    std::memset(memory_, 0xFF, bytes_ + skip_);
    std::free(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : memory_(other.memory_), bytes_(other.bytes_), skip_(other.skip_) {
    other.memory_ = nullptr;
    other.bytes_ = other.skip_ = 0;
  }

  char* data() const {
    return static_cast<char*>(memory_) + skip_;
  }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_, skip_;
};

Outputs run(const Bundle& bundle, const std::vector<Stored>& inputs, std::size_t skip) {
  std::vector<Buffer> buffers;
  std::vector<recstore_tensor> tensors;
  for (const Stored& input : inputs) {
    buffers.emplace_back(input, skip);
    tensors.push_back(input.over(buffers.back().data()));
  }
  Outputs outputs(recstore_bundle_run(bundle.get(), tensors.data(), tensors.size()), recstore_outputs_free);
  for (std::size_t each = 0; each < inputs.size(); ++each) {
    if (inputs[each].bytes() != 0 && std::memcmp(buffers[each].data(), inputs[each].data(), inputs[each].bytes()) != 0) {
      broken("a run wrote to an input");
    }
  }
  return outputs;
}

// Outputs as their files.
std::vector<std::string> files_of(const Outputs& outputs, std::size_t count) {
  std::vector<std::string> files;
  for (std::size_t place = 0; place < count; ++place) {
    const recstore_tensor tensor = recstore_outputs_get(outputs.get(), place);
    const std::int64_t head[2] = {tensor.dtype, static_cast<std::int64_t>(tensor.rank)};
    std::string file(reinterpret_cast<const char*>(head), sizeof(head));
    file.append(reinterpret_cast<const char*>(tensor.shape), tensor.rank * sizeof(std::int64_t));
    if (tensor.bytes != 0) {
      file.append(static_cast<const char*>(tensor.data), tensor.bytes);
    }
    files.push_back(std::move(file));
  }
  return files;
}

void overwrite(const Outputs& outputs, std::size_t count) {
  for (std::size_t place = 0; place < count; ++place) {
    const recstore_tensor tensor = recstore_outputs_get(outputs.get(), place);
    if (tensor.bytes != 0) {
      std::memset(const_cast<void*>(tensor.data), 0xA5, tensor.bytes);
    }
  }
}

// What the bundle of a program gave, as files; throws what it was refused for.
std::vector<std::string> answers(const std::string& program, const std::vector<const char*>& operators) {
  const std::string directory = program + "/bundle";
  Bundle bundle(
      recstore_bundle_open_with(directory.c_str(), "mapped", operators.data(), operators.size()), recstore_bundle_close);
  if (!bundle) {
    throw std::runtime_error(recstore_last_error());
  }
  std::vector<Stored> inputs;
  for (std::size_t place = 0; place < recstore_bundle_num_inputs(bundle.get()); ++place) {
    inputs.emplace_back(program + "/inputs/" + std::to_string(place));
  }
  const std::size_t count = recstore_bundle_num_outputs(bundle.get());
  Outputs first = run(bundle, inputs, 0), second = run(bundle, inputs, 16);
  if (!first || !second) {
    if (first || second) {
      broken("one run was refused, and one was not");
    }
    throw std::runtime_error(recstore_last_error());
  }
  const std::vector<std::string> files = files_of(first, count);
  if (files_of(second, count) != files) {
    broken("a second run gave something else");
  }
  overwrite(second, count);
  const Outputs third = run(bundle, inputs, 0);
  bundle.reset();
  if (files_of(first, count) != files || files_of(third, count) != files) {
    broken("an output changed with another output");
  }
  return files;
}

void tell(const std::string& program, const std::vector<const char*>& operators) {
  std::cout << program << '\t';
  try {
    const std::vector<std::string> files = answers(program, operators);
    for (std::size_t place = 0; place < files.size(); ++place) {
      std::ofstream(program + "/cpp/" + std::to_string(place), std::ios::binary) << files[place];
    }
    std::cout << "gave " << files.size() << std::endl;
  } catch (const std::exception& error) {
    std::string message(error.what());
    for (char& character : message) {
      character = character == '\n' || character == '\t' ? ' ' : character;
    }
    std::cout << "refused: " << message << std::endl;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "usage: run_programs LIST [OPERATOR...]\n";
    return 2;
  }
  const std::vector<const char*> operators(arguments + 2, arguments + count);
  std::ifstream list(arguments[1]);
  for (std::string program; std::getline(list, program);) {
    tell(program, operators);
  }
}
