// A bundle that answers in C++, without Python and without headers of libtorch.
//
//     predict BUNDLE INPUTS OUTPUTS
//
// Reads the elements of each tensor that the bundle takes, INPUTS/<name>.bin, and writes OUTPUTS/<name>.bin.

#include <recstore_runtime.h>

#include <cstdint>
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

constexpr int64_t kSizes[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};  // Of an element, by recstore_dtype.

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// The file of a tensor in a folder. A bundle says its names, so one that could lead elsewhere is refused.
std::string file_of(const std::string& folder, const std::string& name) {
  constexpr char kLetters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";
  if (name.empty() || name.front() == '.' || name.find_first_not_of(kLetters) != std::string::npos) {
    throw std::runtime_error("the name of a tensor is none of a file: " + name);
  }
  return folder + "/" + name + ".bin";
}

// The shape of a tensor of so many bytes, of which one size varies.
std::vector<int64_t> whole(const recstore_tensor& tensor, std::size_t bytes) {
  std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.rank);
  int64_t row = kSizes[tensor.dtype];
  for (const int64_t size : shape) {
    if (size > 0 && __builtin_mul_overflow(row, size, &row)) {
      throw std::runtime_error(std::string(tensor.name) + " is too large");
    }
  }
  for (int64_t& size : shape) {
    size = size == -1 ? static_cast<int64_t>(bytes) / row : size;
  }
  return shape;
}

void predict(const std::string& directory, const std::string& inputs, const std::string& outputs) {
  const Bundle bundle(recstore_bundle_open(directory.c_str(), "mapped"), recstore_bundle_close);
  if (!bundle) {
    throw std::runtime_error(recstore_last_error());
  }
  std::vector<recstore_tensor> tensors;
  std::vector<std::vector<char>> files;
  std::vector<std::vector<int64_t>> shapes;
  for (std::size_t place = 0; place < recstore_bundle_num_inputs(bundle.get()); ++place) {
    recstore_tensor tensor = recstore_bundle_input(bundle.get(), place);
    files.push_back(read(file_of(inputs, tensor.name)));
    shapes.push_back(whole(tensor, files.back().size()));
    tensor.shape = shapes.back().data();
    tensor.data = files.back().data();
    tensor.bytes = files.back().size();
    tensors.push_back(tensor);
  }
  const Outputs given(recstore_bundle_run(bundle.get(), tensors.data(), tensors.size()), recstore_outputs_free);
  if (!given) {
    throw std::runtime_error(recstore_last_error());
  }
  for (std::size_t place = 0; place < recstore_bundle_num_outputs(bundle.get()); ++place) {
    const recstore_tensor tensor = recstore_outputs_get(given.get(), place);
    std::ofstream file(file_of(outputs, tensor.name), std::ios::binary);
    file.write(static_cast<const char*>(tensor.data), static_cast<std::streamsize>(tensor.bytes));
    std::cout << tensor.name << ": " << tensor.bytes << " bytes\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::cerr << "usage: predict BUNDLE INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    predict(arguments[1], arguments[2], arguments[3]);
  } catch (const std::exception& error) {
    std::cerr << "predict: " << error.what() << '\n';
    return 1;
  }
}
