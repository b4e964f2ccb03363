"""Modules of a model that others are put in the place of: where they are, and which of them are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

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
        ValueError: a pattern that matches no path, or a function that chooses none.
    """
    paths = [place.path for each in found for place in each.places]
    if include is None:
        return found
    if callable(include):
        kept = [each for each in found if any(include(place.path, each.module) for place in each.places)]
        if not kept:
            raise ValueError(f"{caller}: include chooses none of {paths}")
        return kept
    patterns = [include] if isinstance(include, str) else list(include)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f'{caller}: the pattern "{pattern}" matches none of {paths}')
    if not patterns:
        raise ValueError(f"{caller}: include has no patterns, and there are {paths}")
    return [each for each in found if any(fnmatchcase(p.path, pattern) for p in each.places for pattern in patterns)]


def held_beside(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the attributes of a model's modules hold, in lists, tuples, sets and dicts too, without what is registered.

    Yields:
        Where it is held, and what it is.
    """
    registries = ("_modules", "_parameters", "_buffers")
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in registries:
                yield from _within(f"{path}.{name}" if path else name, value, set())


def _within(where: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, list | tuple | set | frozenset | dict):
        yield where, value
    elif id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, dict) else value:
            yield from _within(where, each, seen)
