"""Update rules written in Python, for trying one out before it is written in Rust."""

from __future__ import annotations

import abc
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recstore_ops import _native

Floats = NDArray[np.float32]

_ANY_DIM = 64
"""The dim that a rule is asked for its slots of, before any table has it."""


class UpdateRule(abc.ABC):
    """Computes a row's new values from its gradient, in Python.

    The store calls it once for each row of a step, a few microseconds each and one row at a time, whatever the number
    of threads. Write a rule that has proven itself in Rust, as `docs/rust.md` shows.

    Duplicate ids are summed before. Equal arguments must give equal results.
    """

    __module__ = "recstore_ops"

    def slots(self, dim: int) -> dict[str, int]:
        """Returns the names and the widths, in elements, of what is kept beside each row of `dim` elements.

        It starts at zeros, is saved in checkpoints and read by `HashTable.slot`. Nothing by default.
        """
        return {}

    @abc.abstractmethod
    def apply(self, row_D: Floats, slots: dict[str, Floats], gradient_D: Floats, step: int, lr: float) -> Floats:
        """Returns the new row, float32 [D].

        Args:
            row_D: the row before the step; a copy.
            slots: what is kept beside it, by name, `[width]`. Change the arrays, or put others in their places.
            gradient_D: the sum of the row's gradients.
            step: the table's step, from 1.
            lr: its learning rate.
        """

    def adopt(self, row_D: Floats, slots: dict[str, Floats], lr: float) -> None:  # noqa: B027 (an option)
        """Brings `slots` in agreement with a row that was just made, or overwritten. Nothing by default."""


def register_rule(name: str, rule: UpdateRule) -> None:
    """Makes a rule known to the store in this process: tables choose it by `{"kind": "rule", "name": name, "lr": ...}`.

    An exception of the rule is the error of the step, and the table is refused until it is cleared or loaded. A program
    that loads a checkpoint of such a table registers the rule first.

    Raises:
        TypeError: it is no `UpdateRule`, or its `slots` returns no dict of names and whole numbers.
        ValueError: an empty name, or one that another rule has; or a slot without a name, or narrower than 1.
    """
    if not isinstance(rule, UpdateRule):
        raise TypeError(f"expected an UpdateRule, got {type(rule).__name__}")
    called = _CalledRule(rule)
    try:
        widths = rule.slots(_ANY_DIM)
    except Exception:  # It may be for other dims: a table of a dim that it is not for is refused when it is opened.
        widths = {}
    called.check_slots(_ANY_DIM, widths)
    # The store gets None for a rule that does nothing here, so that a new row costs no call of Python.
    adopts = type(rule).adopt is not UpdateRule.adopt
    _native.register_rule(name, called.slots, called.apply, called.adopt if adopts else None)
    warnings.warn(f'the update rule "{name}" is a call of Python for each row: slow', RuntimeWarning, stacklevel=2)


class _CalledRule(NamedTuple):
    """A rule as the store calls it: with bytes."""

    rule: UpdateRule

    def slots(self, dim: int) -> list[tuple[str, int]]:
        widths = self.rule.slots(dim)
        self.check_slots(dim, widths)
        return list(widths.items())

    def check_slots(self, dim: int, widths: object) -> None:
        called = f"{type(self.rule).__name__}.slots({dim})"
        if not isinstance(widths, dict):
            raise TypeError(f"{called} returned {widths!r}; expected a dict of names and widths")
        for name, width in widths.items():
            if not isinstance(name, str) or not isinstance(width, int | np.integer):
                raise TypeError(f"{called} returned {{{name!r}: {width!r}}}; expected a name and a whole number")
            if not name or width < 1:
                raise ValueError(f"{called} returned {{{name!r}: {width}}}; expected a name and a width above 0")

    def apply(self, row: bytes, slots: bytes, gradient: bytes, step: int, lr: float) -> tuple[bytes, bytes]:
        row_D = _floats(row)
        widths = self.rule.slots(len(row_D))
        named = _named(slots, widths)
        new_row_D = self.rule.apply(row_D, named, _floats(gradient), step, lr)
        return _checked("apply returned", new_row_D, row_D.shape), _joined(named, widths)

    def adopt(self, row: bytes, slots: bytes, lr: float) -> bytes:
        row_D = _floats(row)
        widths = self.rule.slots(len(row_D))
        named = _named(slots, widths)
        self.rule.adopt(row_D, named, lr)
        return _joined(named, widths)


def _named(slots: bytes, widths: dict[str, int]) -> dict[str, Floats]:
    ends = np.cumsum([*widths.values()], dtype=np.int64)[:-1]
    return dict(zip(widths, np.split(_floats(slots), ends), strict=True)) if widths else {}


def _joined(named: dict[str, Floats], widths: dict[str, int]) -> bytes:
    if named.keys() != widths.keys():
        raise ValueError(f"expected the slots {', '.join(widths) or 'none'}, got {', '.join(named) or 'none'}")
    return b"".join(_checked(f"slot {name} is", named[name], (width,)) for name, width in widths.items())


def _floats(values: bytes) -> Floats:
    # An array over `bytes` is read-only, and a rule may change its slots in place.
    return np.frombuffer(values, np.float32).copy()


def _checked(what: str, values: Floats, shape: tuple[int, ...]) -> bytes:
    """Returns the bytes of an array of floats of that shape.

    Raises:
        TypeError: it is no array of real numbers.
        ValueError: it has another shape.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        given = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise TypeError(f"{what} {given}; expected an array of floats")
    if values.shape != shape:
        raise ValueError(f"{what} of shape {[*values.shape]}; expected {[*shape]}")
    return values.astype(np.float32).tobytes()
