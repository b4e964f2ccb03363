"""Why a request gets no answer, in the words of both protocols."""

from __future__ import annotations

import reprlib
from enum import Enum


class Kind(Enum):
    """A kind of refusal: its name in metrics, the status of HTTP, the code of gRPC."""

    INVALID = ("invalid", 400, 3)  # INVALID_ARGUMENT
    UNKNOWN = ("unknown", 404, 5)  # NOT_FOUND
    METHOD = ("method", 405, 12)  # UNIMPLEMENTED
    SLOW = ("slow", 408, 4)  # DEADLINE_EXCEEDED
    TOO_LARGE = ("too_large", 413, 8)  # RESOURCE_EXHAUSTED
    ENCODING = ("encoding", 415, 12)  # UNIMPLEMENTED
    FAILED = ("failed", 500, 13)  # INTERNAL
    BUSY = ("busy", 503, 8)  # RESOURCE_EXHAUSTED
    ENDING = ("ending", 503, 14)  # UNAVAILABLE

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.value[0]

    @property
    def status(self) -> int:
        """The status of HTTP."""
        return self.value[1]

    @property
    def code(self) -> int:
        """The number of gRPC's code."""
        return self.value[2]


class Refusal(Exception):
    """A request that gets no answer, and why.

    Attributes:
        kind: of the refusal.
        allowed: the method that the path takes, if that is the reason.
    """

    def __init__(self, kind: Kind, message: str, allowed: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.allowed = allowed


def invalid(message: str) -> Refusal:
    """Returns the refusal of a request that is wrong in itself."""
    return Refusal(Kind.INVALID, message)


def quoted(value: object) -> str:
    """Returns a value as messages show it, however large or deep it is."""
    return _SHORT.repr(value)


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short


_SHORT = _short()
