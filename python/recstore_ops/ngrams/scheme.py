"""`NGramScheme`: which rows of a table the n-grams of a text have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from torch import Tensor

from recstore_ops.ngrams.histories import checked_history, last_of

Meaning: TypeAlias = dict[str, int | str | tuple[int, ...]]
"""The meaning of a table's rows by a scheme: numbers by their names."""


class NGramScheme(ABC):
    """The rows of a table that belong to the n-grams ending at each token of a text.

    Schemes are equal if they have the same `meaning`. A text may be cut anywhere: its pieces have the ids that it has
    as a whole, if each is given the tokens before it (`history_after`). The published schemes take tokens of int64 and
    int32. Their ids are torch's operations on int64, on the device of the tokens, eager, compiled and exported.
    """

    __module__ = "recstore_ops"

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The rows of the table."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """The rows of a token."""

    @property
    @abstractmethod
    def history(self) -> int:
        """How many tokens before the first of a piece its ids depend on."""

    @property
    @abstractmethod
    def start(self) -> int:
        """The token that stands in a history for those before the first of a text."""

    @abstractmethod
    def meaning(self) -> Meaning:
        """Returns all that the rows depend on; the state of an `NGramMemory` has it, and refuses another."""

    @abstractmethod
    def ids(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        """Returns the rows of the n-grams that end at each token.

        Args:
            tokens: `[..., T]`, one text or piece of a text a row.
            history: `[..., H]`, of the same type, the tokens before them. Only the last `self.history` count; fewer
                mean that the texts begin with them. None if the texts begin with `tokens`.

        Returns:
            int64 `[..., T, slots]`, from 0 to below `num_rows`.

        Raises:
            TypeError: tokens or history of another type.
            ValueError: a token that the scheme does not know, with its position, or a history of another shape. A
                program that was compiled or exported raises a `RuntimeError` at such a token.
        """

    def history_after(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        """Returns the history of the piece that follows.

        Args:
            tokens: `[..., T]`, a piece of a text a row; as all that follow it may be empty.
            history: what `ids` was given for it.

        Returns:
            `[..., self.history]`, filled with `start` from the left if the texts are shorter.

        Raises:
            TypeError: another type.
            ValueError: a history of another shape.
        """
        history = checked_history(type(self).__name__, tokens, history)
        return last_of(tokens, history, self.history, self.start)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_rows} rows, {self.slots} for each token>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NGramScheme):
            return NotImplemented
        return self.meaning() == other.meaning()

    def __hash__(self) -> int:
        return hash(tuple(self.meaning().items()))
