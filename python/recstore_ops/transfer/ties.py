"""What else of a model has the weights of modules that are to be replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from recstore_ops.transfer.module_tree import held_beside


def tie_problems(model: nn.Module, weights: dict[str, Tensor], replaced: list[nn.Module]) -> Iterator[str]:
    """Parameters and buffers that are such a weight, or lie in its memory, and stay.

    Args:
        model: the model.
        weights: those of the modules, by the paths of these.
        replaced: the modules, and all within them.
    """
    paths, own = _paths(weights), {id(module) for module in replaced}
    by_storage = _by_storage(weights)
    for where, module, tensor in _tensors(model):
        if id(tensor) in paths and id(module) not in own:
            yield (
                f'"{paths[id(tensor)]}": its weight is also "{where}" of {type(module).__name__}, which stays: '
                "torch.nn.functional.linear(hidden, module(ids)) computes with rows as tied weights do"
            )
        for path in _overlapping(tensor, by_storage):
            yield f'"{path}": its weight shares memory with "{where}", and is another tensor'


def holder_problems(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Attributes that hold the modules themselves."""
    by_id = {id(module): path for path, module in modules.items()}
    for where, value in held_beside(model):
        if id(value) in by_id:
            yield f'"{by_id[id(value)]}": {where} holds the module too, and would keep it: hold it in an nn.ModuleList'


def weight_holders(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """The attributes that hold such a weight beside its module, or a view of one: optimizers, lists for a penalty."""
    paths, by_storage = _paths(weights), _by_storage(weights)
    held = (
        where
        for where, value in held_beside(model)
        if isinstance(value, Tensor) and (id(value) in paths or any(_overlapping(value, by_storage)))
    )
    return list(dict.fromkeys(held))


def _paths(weights: dict[str, Tensor]) -> dict[int, str]:
    return {id(weight): path for path, weight in reversed(weights.items())}


def _by_storage(weights: dict[str, Tensor]) -> dict[int, list[tuple[str, Tensor]]]:
    found: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for path, weight in weights.items():
        found[weight.untyped_storage().data_ptr()].append((path, weight))
    return found


def _overlapping(tensor: Tensor, by_storage: dict[int, list[tuple[str, Tensor]]]) -> Iterator[str]:
    """The paths of weights that a tensor shares memory with, but for the one that it is."""
    for path, weight in by_storage.get(_storage(tensor), ()):
        if tensor is not weight and _overlap(tensor, weight):
            yield path


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{name}" if path else name, module, tensor


def _storage(tensor: Tensor) -> int:
    """Where the memory of a plain tensor begins; 0 for others."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _overlap(tensor: Tensor, weight: Tensor) -> bool:
    first, second = _bytes(tensor), _bytes(weight)
    return max(first.start, second.start) < min(first.stop, second.stop)


def _bytes(tensor: Tensor) -> range:
    """The memory from the first to the last element."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
