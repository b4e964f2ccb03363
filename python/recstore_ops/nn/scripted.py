"""Lookups of collections as `torch.jit.script` compiles them: programs that read rows and collect no gradients.

TorchScript compiles this module, so it is written in the part of Python that TorchScript understands.

Shape suffixes: F features, B examples, D dims of all features together.
"""

import torch
from torch import Tensor

from recstore_ops.nn.weighted_means import divided_by_weights, sums_of_weights
from recstore_ops.sparse import JaggedTensor, KeyedJaggedTensor
from recstore_ops.sparse._bags import bag_of_each


def batch_of_outputs(features: KeyedJaggedTensor, outputs: list[str]) -> KeyedJaggedTensor:
    """The batch with a key for each output, in their order, by the feature of each.

    Raises:
        ValueError: features are missing or come twice, or there are others; features have different numbers of
            examples; or there are ids behind the last bag.
    """
    keys = features.keys()
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise ValueError("a program of torch.jit.script takes batches of one number of examples for all features")
    for key in keys:
        if key not in outputs or keys.count(key) > 1:
            raise ValueError(f"the batch must hold the features {outputs}, each once, got {keys}")
    places = torch.jit.annotate(list[int], [])
    for output in outputs:
        if output not in keys:
            raise ValueError(f"the batch must hold the features {outputs}, each once, got {keys}")
        places.append(keys.index(output))
    if features.values().shape[0] != sum(features.length_per_key()):
        raise ValueError(f"the bags must cover the {features.values().shape[0]} values")
    return features if keys == outputs else features.permute(places)


def refuse_gradients(is_trained: bool) -> None:
    """Refuses a lookup that would collect gradients.

    Raises:
        RuntimeError: it would.
    """
    if is_trained and torch.is_grad_enabled():
        raise RuntimeError("a program of torch.jit.script collects no gradients: call it under torch.no_grad()")


def pooled_rows(
    batch: KeyedJaggedTensor, weights: Tensor | None, tables: list[Tensor], dims: list[int], are_means: list[bool]
) -> Tensor:
    """The bags of every feature, `[B, D]`: one lookup each, for a list of all tables would not outlive `freeze`."""
    lengths, offsets = batch.lengths().reshape(len(dims), -1), batch.offsets().to(torch.int64)
    bounds, size = batch.offset_per_key(), lengths.shape[1]
    columns = torch.jit.annotate(list[Tensor], [])
    for place, dim in enumerate(dims):
        ids = batch.values()[bounds[place] : bounds[place + 1]]
        own = None if weights is None else weights[bounds[place] : bounds[place + 1]]
        starts = offsets[place * size : (place + 1) * size + 1] - bounds[place]
        column = torch.ops.recstore.emb_bag(tables[place], ids, starts, dim, 0, own)[0]
        if are_means[place]:
            divisors = lengths[place].clamp(min=1).to(torch.float32)
            if own is not None:
                divisors = sums_of_weights(bag_of_each(ids, starts), size, own, None)
            column = divided_by_weights(column, divisors.unsqueeze(1))
        columns.append(column)
    return torch.cat(columns, dim=1)


def rows_by_name(
    batch: KeyedJaggedTensor, tables: list[Tensor], dims: list[int], names: list[str], need_indices: bool
) -> dict[str, JaggedTensor]:
    """The row of each id by the name of its output."""
    rows = torch.jit.annotate(dict[str, JaggedTensor], {})
    strides, bounds, bags = batch.stride_per_key(), batch.offset_per_key(), batch.lengths_offset_per_key()
    weights, lengths = batch.weights_or_none(), batch.lengths().reshape(-1)
    for place, name in enumerate(names):
        ids = batch.values()[bounds[place] : bounds[place + 1]]
        own = ids if need_indices else None
        if weights is not None and not need_indices:
            own = weights[bounds[place] : bounds[place + 1]]
        values = torch.ops.recstore.emb_read(tables[place], ids, dims[place])
        rows[name] = JaggedTensor(values, own, lengths[bags[place] : bags[place] + strides[place]], None)
    return rows
