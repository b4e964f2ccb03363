"""Arguments by which kernels of torch read beyond tensors, or end the process: Python and the runtime refuse each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

W = [torch.ones(12, 4), torch.ones(12, 3), torch.ones(12), torch.ones(12)]
BAGS = [False, 0, False, None, False, None]
RNN = [True, 1, {"float": "0.0"}, False, False, True]
LARGEST = (1 << 63) - 1

MISFITS: list[tuple[str, list[Any], list[Any]]] = [
    ("scaled_dot_product_attention.default", [torch.ones(1, 4, 8), torch.ones(1, 2, 8), torch.ones(1, 9, 8)], []),
    ("repeat_interleave.Tensor", [torch.tensor([LARGEST, LARGEST, 8])], []),
    ("repeat_interleave.self_Tensor", [torch.ones(3), torch.tensor([LARGEST, LARGEST, 8])], []),
    ("embedding_bag.padding_idx", [torch.ones(5, 4), torch.arange(4), torch.tensor([0, 3, 1])], BAGS),
    ("embedding_bag.padding_idx", [torch.ones(5, 4), torch.arange(4), torch.tensor([0, 600])], BAGS),
    ("embedding_bag.padding_idx", [torch.ones(5, 4), torch.arange(6), torch.tensor([0, 2])], BAGS),
    ("embedding_bag.padding_idx", [torch.ones(5, 4), torch.tensor(1), torch.tensor([0])], BAGS),
    ("_pad_circular.default", [torch.ones(1, 4, 4)], [[-1, -1]]),
    ("norm_except_dim.default", [torch.ones(0, 4)], []),
    ("_weight_norm.default", [torch.ones(4, 4), torch.ones(1, 1)], []),
    (
        "_native_batch_norm_legit_no_training.default",
        [torch.ones(2, 9), torch.ones(1), torch.ones(9), torch.zeros(9), torch.ones(9)],
        [{"float": "0.1"}, {"float": "1e-05"}],
    ),
    ("lstm.input", [torch.ones(9, 3, 4), [torch.ones(1, 1, 3)] * 2, W], RNN),
    ("lstm.input", [torch.ones(2, 3, 40), [torch.ones(1, 2, 3)] * 2, W], RNN),
    ("lstm.input", [torch.ones(2, 3, 4), [torch.ones(1, 2, 3)] * 2, [*W[:2], W[2][:1], W[3]]], RNN),
    ("lstm.input", [torch.ones(2, 3, 4), [torch.ones(1, 2, 3)] * 2, W[:2]], RNN),
    ("lstm.input", [torch.ones(2, 3, 4), [torch.ones(1, 2, 3)] * 2, [each.double() for each in W]], RNN),
    ("gru.input", [torch.ones(2, 3, 4), torch.ones(1, 2, 3), [each[:1] for each in W]], RNN),
    ("gru.input", [torch.ones(2, 3, 4), torch.ones(1, 2, 3), []], RNN),
    ("rnn_tanh.input", [torch.ones(4), torch.ones(3), [each[:3] for each in W]], RNN),
    ("gru_cell.default", [torch.ones(2, 4), torch.ones(2, 3), *(each[:1] for each in W)], []),
    ("lstm_cell.default", [torch.ones(2, 4), [torch.ones(1, 3)] * 2, *W], []),
]
"""An operator, its tensors or lists of tensors, and the arguments behind them."""


def misfit_calls(name: str, tensors: list[Any], arguments: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """The calls of a graph whose last one gives a tensor, and the inputs that they read."""
    flat: list[Tensor] = []
    numbered: list[Any] = []
    for each in tensors:
        held = each if isinstance(each, list) else [each]
        places = [{"value": len(flat) + place} for place in range(len(held))]
        numbered.append(places if isinstance(each, list) else places[0])
        flat += held
    calls: list[Any] = [[f"aten::{name}", numbered + arguments, {}]]
    if name.startswith(("lstm", "gru.", "rnn", "_native", "embedding_bag")):
        calls.append(["operator.getitem", [{"value": len(flat)}, 0], {}])
    return calls, flat
