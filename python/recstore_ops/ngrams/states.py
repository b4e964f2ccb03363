"""The meaning of a memory's rows, as a tensor of its `state_dict`."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from recstore_ops.ngrams.recstore import RecStoreNGrams
from recstore_ops.ngrams.scheme import Meaning, NGramScheme

_RECSTORE = ("n", "heads", "rows", "hash_seed")


def state_of(scheme: NGramScheme) -> Tensor:
    """Returns the meaning of a scheme as a tensor, int64.

    `RecStoreNGrams` has four numbers, as states had them before there were other schemes. Any other scheme has the
    bytes of its meaning as JSON: int64 too, so that means of equal states are the state.
    """
    meaning = scheme.meaning()
    if isinstance(scheme, RecStoreNGrams):
        numbers = [meaning[name] for name in _RECSTORE]
    else:
        numbers = list(json.dumps(meaning).encode())
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def meaning_of(state: Any) -> Meaning:
    """Returns the meaning that a state has.

    Raises:
        TypeError: it is none that `state_of` gives.
    """
    if isinstance(state, Tensor) and state.dim() == 1:
        numbers = state.tolist()
        if len(numbers) == len(_RECSTORE):
            return dict(zip(_RECSTORE, numbers, strict=True))
        try:
            return _checked(json.loads(bytes(numbers)))
        except (TypeError, ValueError, RecursionError):
            pass
    raise TypeError(f"NGramMemory: expected the tensor that get_extra_state gives, got {state!r}")


def _checked(found: Any) -> Meaning:
    if not isinstance(found, dict):
        raise TypeError("a meaning is a dict")
    return {name: _value(value) for name, value in found.items()}


def _value(value: Any) -> int | str | tuple[int, ...]:
    if isinstance(value, list) and all(type(each) is int for each in value):
        return tuple(value)
    if type(value) is int or isinstance(value, str):
        return value
    raise TypeError("a meaning has integers, texts and lists of integers")


def difference(given: Meaning, own: Meaning) -> tuple[str, str] | None:
    """Returns what two meanings differ in, in words: of the first and of the second; None if they are equal."""
    if given == own:
        return None
    if "scheme" not in own or given.get("scheme") != own["scheme"]:
        return _title(given), _title(own)
    names = [name for name in {**given, **own} if given.get(name) != own.get(name)]
    return _words(given, names), _words(own, names)


def _title(meaning: Meaning) -> str:
    return _words(meaning, ["scheme"] if "scheme" in meaning else list(meaning))


def _words(meaning: Meaning, names: list[str]) -> str:
    return ", ".join(_entry(name, meaning[name]) if name in meaning else f"no {name}" for name in names)


def _entry(name: str, value: int | str | tuple[int, ...]) -> str:
    return f"{name} {list(value) if isinstance(value, tuple) else value}"
