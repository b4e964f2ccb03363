"""Checks of arguments that kernels of torch trust: a graph that others wrote must not read beyond tensors by them.

Each takes the arguments of an operator of the list, when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_MAX = (1 << 63) - 1


def _attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> None:
    _check(key.dim() >= 2 and value.dim() >= 2 and key.shape[-2] == value.shape[-2], "key and value", key, value)


def _division(self: Any, other: Any, *, rounding_mode: str | None = None) -> None:
    if rounding_mode == "trunc" and (dtype := torch.result_type(self, other)) in (torch.int64, torch.int32):
        left, right = (torch.as_tensor(each, dtype=dtype, device="cpu") for each in (self, other))
        # Processors trap: the quotient is beyond the type.
        traps = ((left == torch.iinfo(dtype).min) & (right == -1)).any()
        _check(not bool(traps), "dividends and divisors", left, right)


def _repeats(self: Tensor, repeats: Tensor | None = None, *others: Any, **named: Any) -> None:
    # The kernel makes room for the sum of the counts, which must not overflow.
    counts = self if repeats is None else repeats
    if counts.numel():
        _check(int(counts.min()) >= 0 and int(counts.max()) <= _MAX // counts.numel(), "repeats", counts)


def _segments(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> None:
    rows = data.shape[axis]
    if offsets is not None:
        fits = offsets.dim() == 1 and offsets.numel() > 0 and bool((offsets.diff() >= 0).all())
        _check(axis == 0 and fits and _within(offsets, rows), "data and offsets", data, offsets)
    if lengths is not None:
        fits = lengths.dim() == 1 and _within(lengths, rows)
        _check(axis == 0 and fits and not unsafe, "data and lengths", data, lengths)


def _within(values: Tensor, most: int) -> bool:
    return not values.numel() or (int(values.min()) >= 0 and int(values.max()) <= most)


def _recurrent(
    gates: int,
    states: int,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """Checks the layers of LSTM, GRU and plain networks: each has its parameters, for all gates, of one hidden size."""
    held = [hx] if isinstance(hx, Tensor) else list(hx)
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    count = num_layers * directions
    # Projected states, of LSTM alone: a further matrix of each layer.
    is_projected = states == 2 and len(params) == count * (each + 1)
    each += is_projected
    _check(num_layers > 0 and len(params) == count * each, "params", *params)
    of_one_type = all(tensor.dtype == input.dtype for tensor in (*held, *params))
    _check(input.dim() == 3 and len(held) == states and of_one_type, "input and hx", input, *held)
    _check(params[1].dim() == 2, "params", params[1])
    given_back, size = params[1].shape[1], input.shape[2]
    hidden = params[1].shape[0] // gates if is_projected else given_back
    for place in range(count):
        of_layer = params[place * each : (place + 1) * each]
        given = size if place < directions else given_back * directions
        expected = [(gates * hidden, given), (gates * hidden, given_back)]
        expected += [(gates * hidden,)] * 2 if has_biases else []
        expected += [(given_back, hidden)] if is_projected else []
        _check(all(map(_has_shape, of_layer, expected)), "params", *of_layer)
    batch = input.shape[0 if batch_first else 1]
    sizes = (given_back, hidden)[: len(held)]
    _check(all(_has_shape(state, (count, batch, size)) for state, size in zip(held, sizes, strict=True)), "hx", *held)


def _cell(
    gates: int,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> None:
    """Checks one step of such a network."""
    held = [hx] if isinstance(hx, Tensor) else list(hx)
    hidden = w_hh.shape[-1]
    _check(_has_shape(w_ih, (gates * hidden, input.shape[-1])), "w_ih", w_ih, input)
    _check(_has_shape(w_hh, (gates * hidden, hidden)), "w_hh", w_hh)
    _check(all(bias is None or _has_shape(bias, (gates * hidden,)) for bias in (b_ih, b_hh)), "b_ih and b_hh", w_hh)
    _check(all(tuple(state.shape) == (*input.shape[:-1], hidden) for state in held), "hx", *held)


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *others: Any,
    **named: Any,
) -> None:
    _check(input.dim() >= 2, "input", input)
    held = [each for each in (weight, bias, running_mean, running_var) if each is not None]
    _check(all(_has_shape(each, (input.shape[1],)) for each in held), "input and statistics", input, *held)


def _bags(weight: Tensor, indices: Tensor, offsets: Tensor, *others: Any, **named: Any) -> None:
    _check((weight.dim(), indices.dim(), offsets.dim()) == (2, 1, 1), "weight, indices and offsets", weight, indices)
    are_whole = not any(each.is_floating_point() or each.is_complex() for each in (indices, offsets))
    ascend = not offsets.numel() or (int(offsets[0]) == 0 and bool((offsets.diff() >= 0).all()))
    _check(are_whole and ascend and _within(offsets, indices.numel()), "indices and offsets", indices, offsets)
    _check(_within(indices, weight.shape[0] - 1), "weight and indices", weight, indices)


def _circular(self: Tensor, pad: Sequence[int]) -> None:
    # Less than nothing would give memory as it was before.
    _check(min(pad, default=0) >= 0, f"padding {pad} and a tensor", self)


def _norm(v: Tensor, *others: Any, **named: Any) -> None:
    _check(v.dim() > 0 and v.numel() > 0, "v", v)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    shape = tuple(size if place == dim else 1 for place, size in enumerate(v.shape))
    _check(v.numel() > 0 and 0 <= dim < v.dim() and _has_shape(g, shape) and g.dtype == v.dtype, "v and g", v, g)


def _has_shape(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(tensor.shape) == shape


def _check(fits: bool, what: str, *tensors: Tensor) -> None:
    if not fits:
        raise ValueError(
            f"{what} of shape {', '.join(str(list(each.shape)) for each in tensors)} do not fit each other"
        )


GUARDS: dict[str, Callable[..., None]] = {
    "aten::scaled_dot_product_attention.default": _attention,
    "aten::repeat_interleave.Tensor": _repeats,
    "aten::repeat_interleave.self_Tensor": _repeats,
    "aten::segment_reduce.default": _segments,
    **{f"aten::{name}.{other}_mode": _division for name in ("div", "divide") for other in ("Tensor", "Scalar")},
    "aten::embedding_bag.default": _bags,
    "aten::embedding_bag.padding_idx": _bags,
    "aten::_pad_circular.default": _circular,
    "aten::norm_except_dim.default": _norm,
    "aten::_native_batch_norm_legit_no_training.default": _batch_norm,
    "aten::_weight_norm.default": _weight_norm,
    "aten::lstm.input": partial(_recurrent, 4, 2),
    "aten::gru.input": partial(_recurrent, 3, 1),
    "aten::rnn_tanh.input": partial(_recurrent, 1, 1),
    "aten::rnn_relu.input": partial(_recurrent, 1, 1),
    "aten::lstm_cell.default": partial(_cell, 4),
    "aten::gru_cell.default": partial(_cell, 3),
    "aten::rnn_tanh_cell.default": partial(_cell, 1),
    "aten::rnn_relu_cell.default": partial(_cell, 1),
}
"""The checks, by the names of operators."""


_WINDOWS = ("dilation", "groups", "kernel_size", "output_padding", "output_size", "pad", "padding", "stride")
"""Arguments that kernels multiply with the sizes of tensors."""
_LARGEST_WINDOW = (1 << 31) - 1


def guarded(name: str, overload: OpOverload) -> Callable[..., Any]:
    """Returns an operator that is called if its arguments fit each other.

    Raises:
        ValueError: when it is called, and they do not.
    """
    arguments = [argument.name for argument in overload._schema.arguments]
    windows = [(place, each) for place, each in enumerate(arguments) if each in _WINDOWS]
    check = GUARDS.get(name)
    if check is None and not windows:
        return overload

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            for place, window in windows:
                _check_window(args[place] if place < len(args) else kwargs.get(window, 0), window)
            if check is not None:
                check(*args, **kwargs)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{name}: {error}") from None
        return overload(*args, **kwargs)

    return checked


def _check_window(value: Any, name: str) -> None:
    sizes = value if isinstance(value, list) else [value]
    if any(isinstance(size, int) and abs(size) > _LARGEST_WINDOW for size in sizes):
        raise ValueError(f"{name} has more than 32 bits, got {value}")
