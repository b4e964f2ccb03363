"""Schemes whose rows follow from the last few tokens alone, and the tokens that they take."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recstore_ops.ngrams.histories import checked_history, last_of
from recstore_ops.ngrams.scheme import NGramScheme

TOKEN_TYPES = (torch.int64, torch.int32)


class WindowScheme(NGramScheme):
    """A scheme of which a subclass says the tokens, and the rows by the last tokens at each position."""

    def ids(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        """The rows of the n-grams that end at each token, as `NGramScheme.ids`."""
        owner = type(self).__name__
        check_tokens(owner, "tokens", tokens)
        known = last_of(tokens[..., :0], checked_history(owner, tokens, history), self.history, self.start)
        self._check_known("tokens", tokens, None)
        if history is not None:
            self._check_known(f"the last {self.history} tokens of history", known, self.start)
        text = self._read(torch.cat([known, tokens], dim=-1))
        back = [text.narrow(-1, self.history - steps, tokens.shape[-1]) for steps in range(self.history + 1)]
        return torch.stack(self._rows(back), dim=-1)

    def _check_known(self, what: str, tokens: Tensor, start: int | None) -> None:
        check_range(type(self).__name__, what, tokens, self._least_token, self._num_tokens, start)

    @property
    def _least_token(self) -> int:
        """0, or the least of what stands for no token of the vocabulary."""
        return 0

    @property
    @abstractmethod
    def _num_tokens(self) -> int:
        """One more than the largest token."""

    def _read(self, tokens: Tensor) -> Tensor:
        """Returns the tokens that are hashed, int64."""
        return tokens.to(torch.int64)

    @abstractmethod
    def _rows(self, back: list[Tensor]) -> list[Tensor]:
        """Returns the row of each slot, `[..., T]` each.

        Args:
            back: at each position the token, the one before it, and so on, `[..., T]` each.
        """


class HeadedScheme(WindowScheme):
    """A scheme with as many hash functions for each length from 2 to `n`, each with a range of rows of its own.

    Attributes:
        n: the length of the longest n-grams.
        heads: hash functions of each length.
        moduli: the rows of each function, those of length 2 first.
    """

    n: int
    heads: int
    moduli: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The sum of the moduli."""
        return sum(self.moduli)

    @property
    def slots(self) -> int:
        """The rows of a token, `(n - 1) * heads`."""
        return len(self.moduli)

    @property
    def history(self) -> int:
        """The tokens of a history, `n - 1`."""
        return self.n - 1


def check_tokens(owner: str, what: str, tokens: Tensor) -> None:
    """Checks the type of tokens.

    Raises:
        TypeError: no dense tensor of int64 or int32.
        ValueError: a tensor without dimensions.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{owner}: {what} must be a tensor, got {type(tokens).__name__}")
    if tokens.dtype not in TOKEN_TYPES or tokens.layout != torch.strided:
        raise TypeError(f"{owner}: {what} must be dense and of int64 or int32, got {tokens.dtype}, {tokens.layout}")
    if tokens.dim() == 0:
        raise ValueError(f"{owner}: {what} must have a dimension of positions, got a tensor without dimensions")


def check_range(owner: str, what: str, tokens: Tensor, least: int, end: int, start: int | None = None) -> None:
    """Checks that a scheme knows all tokens. A program that is traced has the check as an operator.

    Args:
        owner: begins the message.
        what: names the tokens.
        tokens: of any shape.
        least: the least token.
        end: one more than the largest.
        start: a further token.

    Raises:
        ValueError: it does not; names the first such token, its position, and the range.
    """
    if tokens.is_meta:
        return
    tokens = tokens.to(torch.int64)  # The ends may be beyond int32.
    is_outside = (tokens < least) | (tokens >= end)
    if start is not None:
        is_outside = is_outside & (tokens != start)
    known = f"from {least} to {end - 1}"
    if _has_no_values(is_outside):
        torch.ops.aten._assert_async.msg(~is_outside.any(), f"{owner}: {what} must be {known}")
    elif is_outside.any():
        position = is_outside.nonzero()[0].tolist()
        token = tokens[tuple(position)].item()
        raise ValueError(f"{owner}: expected {what} {known}, got {token} at position {position}")


def _has_no_values(tensor: Tensor) -> bool:
    """Whether a program is traced, or a tensor stands for a shape alone."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return is_traced or isinstance(tensor, FakeTensor)


def cut_at(back: list[Tensor], stop: int, fill: int, first: int) -> list[Tensor]:
    """Returns the last tokens at each position, without those behind a token that ends a look back.

    Args:
        back: at each position the token, the one before it, and so on, `[..., T]` each.
        stop: the token that ends a look back. It is filled itself, and so are all older ones.
        fill: stands in the place of those.
        first: the first element of `back` that may end it: 0, or 1 if a token sees what is before itself, whichever
            token it is.
    """
    seen = back[:first]
    is_cut = torch.zeros_like(back[0], dtype=torch.bool)
    for tokens in back[first:]:
        is_cut = is_cut | (tokens == stop)
        seen.append(torch.where(is_cut, fill, tokens))
    return seen


def remainders(mix: Tensor, moduli: tuple[int, ...], offsets: tuple[int, ...]) -> list[Tensor]:
    """Returns `mix mod modulus + offset` for each pair of them, the remainder never negative."""
    return [mix % modulus + offset for modulus, offset in zip(moduli, offsets, strict=True)]


def rows_by_xor(
    back: list[Tensor], multipliers: tuple[int, ...], moduli: tuple[int, ...], offsets: tuple[int, ...]
) -> list[Tensor]:
    """Returns rows by the xor of products, as Engram and its relatives make them.

    `mix = t0 m0`. For n = 2, 3, ...: `mix = mix xor t(n-1) m(n-1)`, and each head of n has the remainder of `mix` by
    its modulus, plus its offset.

    Args:
        back: the tokens t0, t1, ... at each position, `[..., T]` each.
        multipliers: m0, m1, ...: one for each.
        moduli: of the heads of n = 2, then of those of n = 3, and so on; each n has as many.
        offsets: as the moduli.

    Returns:
        One tensor `[..., T]` for each modulus.
    """
    heads = len(moduli) // (len(back) - 1)
    mix = back[0] * multipliers[0]
    rows: list[Tensor] = []  # dynamo knows no call of `list[Tensor]`.
    for steps in range(1, len(back)):
        mix = mix ^ (back[steps] * multipliers[steps])
        of_order = slice((steps - 1) * heads, steps * heads)
        rows += remainders(mix, moduli[of_order], offsets[of_order])
    return rows
