"""Functions that take keywords by a typed description, as `**options: Unpack[Description]`.

Python itself takes any keyword there, and shows none in the function's signature.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar, get_type_hints

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes(
    description: type[Any], defaults: Mapping[str, object] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function refuse keywords that are unknown, and show in its signature those of the description.

    The function raises `TypeError` as Python does, with the nearest name that it takes.

    Args:
        description: the `TypedDict` of the function's `**options`.
        defaults: what the signature shows for options whose default is not `None`.
    """

    def checking(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = _with_options(inspect.signature(function), get_type_hints(description), defaults or {})

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in signature.parameters:
                    raise TypeError(_unexpected(name, function, signature.parameters))
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return checking


def _with_options(
    signature: inspect.Signature, types: Mapping[str, Any], defaults: Mapping[str, object]
) -> inspect.Signature:
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in types.items()
    ]
    return signature.replace(parameters=[*own, *options])


def _unexpected(name: str, function: Callable[..., object], known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    advice = f". Did you mean '{near[0]}'?" if near else ""
    return f"{function.__qualname__}() got an unexpected keyword argument '{name}'{advice}"
