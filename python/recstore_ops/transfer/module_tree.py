"""Modules of a model that others replace: how to find them and to choose among them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Include = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
"""Chooses modules: patterns of their paths, or a function of a path and its module; `None` for all."""


@dataclass(frozen=True)
class Registration:
    """The place at which a module is registered.

    Attributes:
        path: as in `named_modules`.
        name: the name of the module in its parent.
        above: the modules around it, from the model to its parent.
    """

    path: str
    name: str
    above: tuple[nn.Module, ...]

    def put(self, module: nn.Module) -> None:
        """Registers another module here."""
        self.above[-1]._modules[self.name] = module


@dataclass(frozen=True)
class FoundModule:
    """A module of a model, with all its places."""

    module: Any
    places: list[Registration] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.places[0].path

    def put(self, module: nn.Module) -> None:
        """Puts another module in its place, everywhere."""
        for place in self.places:
            place.put(module)


def found_in(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[FoundModule]:
    """The modules of a model that are wanted, each once, without what is within them."""
    found: dict[int, FoundModule] = {}
    seen: set[int] = set()

    def visit(path: str, above: tuple[nn.Module, ...]) -> None:
        # A shared module has one `_modules`, so a place within it is one place, by whichever path it is reached.
        if id(above[-1]) in seen:
            return
        seen.add(id(above[-1]))
        for name, module in above[-1]._modules.items():
            place = Registration(f"{path}{name}", name, above)
            if module is not None and is_wanted(module):
                found.setdefault(id(module), FoundModule(module)).places.append(place)
            elif module is not None:
                visit(f"{place.path}.", (*above, module))

    visit("", (model,))
    return list(found.values())


def chosen(found: list[FoundModule], include: Include, caller: str) -> list[FoundModule]:
    """Those of the modules that `include` means.

    Raises:
        TypeError: neither patterns nor a function.
        ValueError: a pattern that matches no path, or a function that chooses none.
    """
    paths = [place.path for each in found for place in each.places]
    if include is None:
        return found
    patterns = _patterns(include, caller)
    if callable(include):
        kept = [each for each in found if any(include(place.path, each.module) for place in each.places)]
        if not kept:
            raise ValueError(f"{caller}: include chooses none of {paths}")
        return kept
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f'{caller}: the pattern "{pattern}" matches none of {paths}')
    if not patterns:
        raise ValueError(f"{caller}: include has no patterns, and there are {paths}")
    return [each for each in found if any(fnmatchcase(p.path, pattern) for p in each.places for pattern in patterns)]


def _patterns(include: Any, caller: str) -> list[str]:
    """The patterns of paths; none if a function chooses."""
    if callable(include) and not isinstance(include, type | nn.Module):
        return []
    patterns: list[Any] = [include]
    if isinstance(include, Iterable) and not isinstance(include, str | bytes | type):
        patterns = list(include)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{caller}: include must be a pattern of paths, several, or include(path, module), got {include!r}"
            )
    return patterns


def held_beside(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Finds objects in the attributes of a model's modules, besides the registered ones.

    It also finds objects in containers, optimizers, bound methods, partial functions, and the attributes of other
    objects in these attributes. It does not look into closures.

    Yields:
        The path of the attribute, and the object.
    """
    own = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _REGISTRIES:
                # A copy of the set for each attribute, so that contents which two of them share are found below both.
                yield from _within(f"{path}.{name}" if path else name, value, set(own), False)


_REGISTRIES = ("_modules", "_parameters", "_buffers")


def _within(where: str, value: Any, seen: set[int], in_object: bool) -> Iterator[tuple[str, Any]]:
    """A value and everything within it, except the contents of values already seen."""
    if value is None or isinstance(value, str | bytes | int | float):
        return  # A list may hold millions of them.
    # Even if it was seen: each holder of an object counts, only the contents are not visited again.
    yield where, value
    if id(value) in seen:
        return
    seen.add(id(value))
    parts = _parts(value)
    if parts is None and not in_object:
        in_object, parts = True, _attributes(value)
    for each in list(parts or ()):
        yield from _within(where, each, seen, in_object)


def _parts(value: Any) -> Iterable[Any] | None:
    """The contents of a value of a known type; `None` for others."""
    match value:
        case dict():
            return value.values()
        case list() | tuple() | set() | frozenset() | deque():
            return value
        case MethodType():
            return (value.__self__, value.__func__)
        case partial():
            return (value.func, value.args, value.keywords)
        case Optimizer():
            return [parameter for group in value.param_groups for parameter in group["params"]]
    return None


def _attributes(value: Any) -> Iterable[Any]:
    """The values of the attributes of an object, if a model may keep things in objects of its kind."""
    if isinstance(value, Tensor | type | ModuleType):
        return ()
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else ()


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
    # Backwards, so that a weight with several paths has the first of them.
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
        # `named_parameters` gives a tied weight once, and its other paths are the ones that matter here.
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{name}" if path else name, module, tensor


def _storage(tensor: Tensor) -> int:
    """The address at which the memory of a plain tensor begins; 0 for others."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _overlap(tensor: Tensor, weight: Tensor) -> bool:
    first, second = _bytes(tensor), _bytes(weight)
    return max(first.start, second.start) < min(first.stop, second.stop)


def _bytes(tensor: Tensor) -> range:
    """The memory from the first to the last element."""
    if tensor.numel() == 0:
        return range(0)
    # A range is no set of elements: views with interleaved elements count as overlapping, too.
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
