"""Modules of a model that others are put in the place of: where they are, and which of them are meant."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Include = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
"""Which modules are meant: patterns of their paths, or what says so of a path and its module; all where `None`."""


@dataclass(frozen=True)
class Place:
    """Where a module is registered.

    Attributes:
        path: as in `named_modules`.
        name: the one under which its parent has it.
        above: the modules that it is within, from the model to its parent.
    """

    path: str
    name: str
    above: tuple[nn.Module, ...]

    def put(self, module: nn.Module) -> None:
        """Registers another module here."""
        self.above[-1]._modules[self.name] = module


@dataclass(frozen=True)
class Found:
    """A module of a model, with all its places."""

    module: Any
    places: list[Place] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.places[0].path

    def put(self, module: nn.Module) -> None:
        """Puts another module in its place, everywhere."""
        for place in self.places:
            place.put(module)


def found_in(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[Found]:
    """The modules of a model that are wanted, each once, without what is within them."""
    found: dict[int, Found] = {}
    seen: set[int] = set()

    def visit(path: str, above: tuple[nn.Module, ...]) -> None:
        if id(above[-1]) in seen:
            return
        seen.add(id(above[-1]))
        for name, module in above[-1]._modules.items():
            place = Place(f"{path}{name}", name, above)
            if module is not None and is_wanted(module):
                found.setdefault(id(module), Found(module)).places.append(place)
            elif module is not None:
                visit(f"{place.path}.", (*above, module))

    visit("", (model,))
    return list(found.values())


def chosen(found: list[Found], include: Include, caller: str) -> list[Found]:
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
    """The patterns of paths; none where a function chooses."""
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
    """What the attributes of a model's modules hold beside what is registered.

    Also what containers, optimizers, bound methods and partial functions hold, and other objects in attributes of
    theirs. A closure shows nothing of what it holds.

    Yields:
        Where it is held, and what it is.
    """
    own = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _REGISTRIES:
                yield from _within(f"{path}.{name}" if path else name, value, set(own), False)


_REGISTRIES = ("_modules", "_parameters", "_buffers")


def _within(where: str, value: Any, seen: set[int], in_object: bool) -> Iterator[tuple[str, Any]]:
    """A value, and all that is within it but for what is within what was seen."""
    if value is None or isinstance(value, str | bytes | int | float):
        return  # A list may hold millions of them.
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
    """What a value of a known type holds; `None` for others."""
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
    """What the attributes of an object hold, where it is one that a model may keep things in."""
    if isinstance(value, Tensor | type | ModuleType):
        return ()
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else ()
