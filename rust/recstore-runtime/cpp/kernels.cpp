// What the kernels of listed operators do not check themselves: they end the process, or give memory as they find it.

#include "recstore-runtime/cpp/kernels.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ScalarOps.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/result_type.h>

namespace recstore::runtime {

namespace {

using Arguments = std::vector<c10::IValue>;

void expect(bool holds, const char* otherwise) {
  if (!holds) {
    throw std::runtime_error(otherwise);
  }
}

bool has_shape(const at::Tensor& tensor, std::vector<int64_t> shape) {
  return tensor.defined() && tensor.sizes() == at::IntArrayRef(shape);
}

bool lie_within(const at::Tensor& numbers, int64_t most) {
  return numbers.numel() == 0 || (numbers.min().item<int64_t>() >= 0 && numbers.max().item<int64_t>() <= most);
}

// Kernels multiply the sizes of windows with those of tensors.
constexpr int64_t kLargestWindow = std::numeric_limits<int32_t>::max();

const std::unordered_set<std::string> kWindows = {
    "dilation", "groups", "kernel_size", "num_layers", "output_padding", "output_size", "pad", "padding", "stride",
};

void check_window(const c10::IValue& window) {
  const auto is_small = [](int64_t size) { return size >= -kLargestWindow && size <= kLargestWindow; };
  bool fits = !window.isInt() || is_small(window.toInt());
  if (window.isIntList()) {
    for (const int64_t size : window.toIntVector()) {
      fits = fits && is_small(size);
    }
  }
  expect(fits, "a size of a window has more than 32 bits");
}

// Processors trap where the smallest integer of a type is divided by -1: the quotient is none of the type.
void check_truncated_division(const Arguments& arguments) {
  if (arguments.size() < 3 || !arguments[2].isString() || arguments[2].toStringRef() != "trunc") {
    return;
  }
  const at::Tensor& left = arguments[0].toTensor();
  const at::Tensor right =
      arguments[1].isTensor() ? arguments[1].toTensor() : at::native::wrapped_scalar_tensor(arguments[1].toScalar());
  const at::ScalarType type = at::result_type(left, right);
  if (type != at::kLong && type != at::kInt) {
    return;
  }
  const int64_t smallest =
      type == at::kLong ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int32_t>::min();
  const at::Tensor traps = left.to(type).eq(smallest).logical_and(right.to(type).eq(-1));
  expect(!traps.any().item<bool>(), "the smallest integer has no quotient by -1");
}

// (v, g, dim)
void check_weight_norm(const Arguments& arguments) {
  const at::Tensor &direction = arguments[0].toTensor(), &lengths = arguments[1].toTensor();
  expect(arguments[2].toInt() >= 0, "the dimension of lengths must be counted from the first");
  const int64_t dim = at::maybe_wrap_dim(arguments[2].toInt(), direction.dim());
  const bool fits = direction.numel() != 0 && direction.dim() == lengths.dim() && direction.dim() != 0 &&
      lengths.numel() == lengths.size(dim) && lengths.size(dim) == direction.size(dim) &&
      direction.scalar_type() == lengths.scalar_type() && at::isFloatingType(lengths.scalar_type());
  expect(fits, "a weight must have elements, and a length for each of a dimension");
}

// (v, ...)
void check_norm(const Arguments& arguments) {
  const at::Tensor& weight = arguments[0].toTensor();
  expect(weight.dim() != 0 && weight.numel() != 0, "a weight must have elements");
}

// (self, pad)
void check_circular(const Arguments& arguments) {
  const std::vector<int64_t> pad = arguments[1].toIntVector();
  const auto is_least = [](int64_t size) { return size >= 0; };
  expect(std::all_of(pad.begin(), pad.end(), is_least), "circular padding below 0 gives memory as it was before");
}

// (weight, indices, offsets, ...)
void check_bags(const Arguments& arguments) {
  const at::Tensor &weight = arguments[0].toTensor(), &indices = arguments[1].toTensor(),
                   &offsets = arguments[2].toTensor();
  const bool are_whole =
      at::isIntegralType(indices.scalar_type(), false) && at::isIntegralType(offsets.scalar_type(), false);
  expect(
      weight.dim() == 2 && indices.dim() == 1 && offsets.dim() == 1 && are_whole,
      "bags take a matrix, and indices and offsets of one dimension");
  expect(lie_within(indices, weight.size(0) - 1), "an index of a bag is none of a row");
  const at::Tensor starts = offsets.to(at::kLong);
  const bool ascend = starts.numel() < 2 || starts.diff().min().item<int64_t>() >= 0;
  const bool begin_first = starts.numel() == 0 || starts[0].item<int64_t>() == 0;
  expect(ascend && begin_first && lie_within(starts, indices.numel()), "offsets of bags must ascend from 0 to the number of indices");
}

// (query, key, value, ...)
void check_attention(const Arguments& arguments) {
  const at::Tensor &keys = arguments[1].toTensor(), &values = arguments[2].toTensor();
  const bool fits = keys.dim() >= 2 && values.dim() >= 2 && keys.size(-2) == values.size(-2);
  expect(fits, "there must be as many values as keys");
}

// (repeats, output_size) or (self, repeats, dim, output_size)
void check_repeats(const Arguments& arguments) {
  if (arguments.size() > 1 && arguments[1].isInt() && arguments.size() > 2) {
    return;
  }
  const at::Tensor& repeats = (arguments.size() > 2 ? arguments[1] : arguments[0]).toTensor();
  const int64_t most = std::numeric_limits<int64_t>::max() / std::max<int64_t>(repeats.numel(), 1);
  expect(lie_within(repeats, most), "numbers of repeats must not be negative, and their sum have 64 bits");
}

// (data, reduce, lengths, indices, offsets, axis, unsafe, initial)
void check_segments(const Arguments& arguments) {
  const at::Tensor& rows = arguments[0].toTensor();
  const bool is_first = arguments[5].toInt() == 0 && rows.dim() > 0;
  if (!arguments[4].isNone()) {
    const at::Tensor& offsets = arguments[4].toTensor();
    const bool ascend = offsets.dim() == 1 && offsets.numel() > 0 &&
        (offsets.numel() < 2 || offsets.diff().min().item<int64_t>() >= 0);
    expect(is_first && ascend && lie_within(offsets, rows.size(0)), "offsets of segments must ascend within the rows");
  }
  if (!arguments[2].isNone()) {
    const at::Tensor& lengths = arguments[2].toTensor();
    const bool fits = is_first && lengths.dim() == 1 && lie_within(lengths, rows.size(0));
    expect(fits && !arguments[6].toBool(), "lengths of segments must be those of rows");
  }
}

// (input, weight, bias, running_mean, running_var, ...)
void check_statistics(const Arguments& arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  expect(input.dim() >= 2, "the input must have channels");
  for (std::size_t each = 1; each <= 4; ++each) {
    expect(
        arguments[each].isNone() || has_shape(arguments[each].toTensor(), {input.size(1)}),
        "weight, bias and statistics must have a number for each channel");
  }
}

std::vector<at::Tensor> states_of(const c10::IValue& states) {
  return states.isTensorList() ? states.toTensorVector() : std::vector<at::Tensor>{states.toTensor()};
}

// (input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
template <int64_t kGates, std::size_t kStates>
void check_recurrent(const Arguments& arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const std::vector<at::Tensor> states = states_of(arguments[1]), parameters = arguments[2].toTensorVector();
  const int64_t layers = arguments[4].toInt(), directions = arguments[7].toBool() ? 2 : 1;
  const bool has_biases = arguments[3].toBool();
  expect(layers >= 1 && layers <= kLargestWindow, "there must be a layer");
  const auto count = static_cast<std::size_t>(layers * directions);
  const std::size_t plain = has_biases ? 4 : 2;
  // Projected states, of LSTM alone: a further matrix of each layer.
  const bool is_projected = kStates == 2 && parameters.size() == count * (plain + 1);
  const std::size_t each = plain + (is_projected ? 1 : 0);
  expect(parameters.size() == count * each, "there must be the parameters of each layer and direction");
  expect(input.dim() == 3 && states.size() == kStates, "the input must have three dimensions, and a state of each kind");
  const auto is_of_type = [&input](const at::Tensor& tensor) {
    return tensor.defined() && tensor.scalar_type() == input.scalar_type();
  };
  const bool are_of_type = std::all_of(states.begin(), states.end(), is_of_type) &&
      std::all_of(parameters.begin(), parameters.end(), is_of_type);
  expect(are_of_type, "states and parameters must be of the type of the input");
  expect(parameters[1].dim() == 2, "a parameter has another shape than its layer");
  const int64_t given_back = parameters[1].size(1);
  const int64_t hidden = is_projected ? parameters[1].size(0) / kGates : given_back;
  for (std::size_t layer = 0; layer < count; ++layer) {
    const int64_t given = layer < static_cast<std::size_t>(directions) ? input.size(2) : given_back * directions;
    std::vector<std::vector<int64_t>> shapes = {{kGates * hidden, given}, {kGates * hidden, given_back}};
    if (has_biases) {
      shapes.insert(shapes.end(), 2, {kGates * hidden});
    }
    if (is_projected) {
      shapes.push_back({given_back, hidden});
    }
    for (std::size_t part = 0; part < each; ++part) {
      expect(has_shape(parameters[layer * each + part], shapes[part]), "a parameter has another shape than its layer");
    }
  }
  const int64_t batch = input.size(arguments[8].toBool() ? 0 : 1);
  for (std::size_t kind = 0; kind < states.size(); ++kind) {
    const int64_t size = kind == 0 ? given_back : hidden;
    expect(has_shape(states[kind], {layers * directions, batch, size}), "a state has another shape than its layers");
  }
}

// (input, hx, w_ih, w_hh, b_ih, b_hh)
template <int64_t kGates>
void check_cell(const Arguments& arguments) {
  const at::Tensor &input = arguments[0].toTensor(), &recurrent = arguments[3].toTensor();
  expect(recurrent.dim() == 2 && input.dim() > 0, "a weight must be a matrix");
  const int64_t hidden = recurrent.size(1);
  const bool are_weights = has_shape(arguments[2].toTensor(), {kGates * hidden, input.size(-1)}) &&
      has_shape(recurrent, {kGates * hidden, hidden});
  expect(are_weights, "a weight has another shape than its input");
  for (const std::size_t bias : {4, 5}) {
    expect(
        arguments[bias].isNone() || has_shape(arguments[bias].toTensor(), {kGates * hidden}),
        "a bias has another shape than its weight");
  }
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = hidden;
  for (const at::Tensor& state : states_of(arguments[1])) {
    expect(has_shape(state, shape), "a state has another shape than its input");
  }
}

const std::unordered_map<std::string, void (*)(const Arguments&)> kChecks = {
    {"aten::div", check_truncated_division},
    {"aten::divide", check_truncated_division},
    {"aten::_weight_norm", check_weight_norm},
    {"aten::norm_except_dim", check_norm},
    {"aten::_pad_circular", check_circular},
    {"aten::embedding_bag", check_bags},
    {"aten::scaled_dot_product_attention", check_attention},
    {"aten::repeat_interleave", check_repeats},
    {"aten::segment_reduce", check_segments},
    {"aten::_native_batch_norm_legit_no_training", check_statistics},
    {"aten::lstm", check_recurrent<4, 2>},
    {"aten::gru", check_recurrent<3, 1>},
    {"aten::rnn_tanh", check_recurrent<1, 1>},
    {"aten::rnn_relu", check_recurrent<1, 1>},
    {"aten::lstm_cell", check_cell<4>},
    {"aten::gru_cell", check_cell<3>},
    {"aten::rnn_tanh_cell", check_cell<1>},
    {"aten::rnn_relu_cell", check_cell<1>},
};

}  // namespace

KernelCheck::KernelCheck(const c10::FunctionSchema& schema) : check_(nullptr) {
  for (std::size_t each = 0; each < schema.arguments().size(); ++each) {
    if (kWindows.count(schema.arguments()[each].name()) != 0) {
      windows_.push_back(each);
    }
  }
  if (const auto found = kChecks.find(schema.name()); found != kChecks.end()) {
    check_ = found->second;
  }
}

void KernelCheck::operator()(const std::vector<c10::IValue>& arguments) const {
  for (const std::size_t place : windows_) {
    check_window(arguments[place]);
  }
  if (check_ != nullptr) {
    check_(arguments);
  }
}

}  // namespace recstore::runtime
