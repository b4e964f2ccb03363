"""`NGramMemory`: what a table remembers of the n-grams of a text, let into the hidden states of a language model."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULTS, TableOptions
from recstore_ops.ngrams.ranges import MAX_INT64, in_range
from recstore_ops.ngrams.recstore import RecStoreNGrams
from recstore_ops.ngrams.scheme import NGramScheme
from recstore_ops.ngrams.states import difference, meaning_of, state_of
from recstore_ops.nn.copies import Copies
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.staging import StagedRows
from recstore_ops.sharding.rows import failing_together


class _Default(int):
    """A default, which is another object than the same number that a caller gives."""


class NGramMemory(nn.Module):
    """Adds to the hidden state of each token what a table remembers of the n-grams that end at it.

    Each length from 2 to `n` has `heads` hash functions, and each of those `rows` rows. The rows of the n-grams that
    end at a token, one of each function, are joined to `e`; then, with `norm` the RMS norm of a vector,

        k = W_k e;  v = W_v e;  a = sigmoid(<norm(h), norm(k)> / sqrt(hidden_dim));  h + a * v

    Only n-grams that were trained on have a row, and a step changes only those of its text. `W_v` starts at zero: a new
    memory changes no hidden state.

    Source: Cheng et al. 2026, "Conditional Memory via Scalable Lookup" (arXiv 2601.07372), section 2, without its
    convolution and its merging of tokens.

    Args:
        hidden_dim: elements of a hidden state.
        rows: the most rows of each hash function; None with a `scheme`.
        dim: elements of a row.
        name: the table's name.
        n: the length of the longest n-grams, from 2 to 256.
        heads: hash functions of each length, from 1 to 1,024.
        hash_seed: an int64, of the hash functions; function k has `hash_seed + k`, in 64 bits.
        scheme: the rows of n-grams by a published scheme, such as `DeepSeekNGrams`, in place of `rows`, `n`, `heads`
            and `hash_seed`.
        **options: see `recstore_ops.TableOptions`.

    Attributes:
        scheme: what gives the rows of tokens.

    `state_dict` has the meaning of the rows beside them: `n`, `heads`, `rows` and `hash_seed`, or that of the scheme.
    Loading one with another meaning is an error.

    Raises:
        TypeError: a number that is no integer, or a scheme beside numbers that it has itself.
        ValueError: a number out of its range, or more rows than int64 has ids; further as `DistEmbedding`.
    """

    __module__ = "recstore_ops"

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        hidden_dim: int,
        rows: int | None,
        dim: int,
        name: str,
        *,
        n: int = _Default(3),
        heads: int = _Default(2),
        hash_seed: int = _Default(0),
        scheme: NGramScheme | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__()
        hidden_dim = in_range("NGramMemory", "hidden_dim", hidden_dim, 1, MAX_INT64)
        dim = in_range("NGramMemory", "dim", dim, 1, MAX_INT64)
        self.scheme = _scheme_of(scheme, rows, {"n": n, "heads": heads, "hash_seed": hash_seed})
        self.table = DistEmbedding(self.scheme.num_rows, dim, name, **options)
        self.key = nn.Linear(self.scheme.slots * dim, hidden_dim, bias=False)
        self.value = nn.Linear(self.scheme.slots * dim, hidden_dim, bias=False)
        # A new memory adds nothing, so that it may be put into a model that is trained already.
        nn.init.zeros_(self.value.weight)

    def ids(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        """Returns the ids of the n-grams that end at each token, int64 `[..., T, slots]`.

        They depend on the tokens alone, so that `StagingDataLoader` reads rows while the batch before is trained on. A
        token has `(n - 1) * heads` slots, or those of the scheme.

        Args:
            tokens: int64 `[..., T]`, one text or piece of a text a row.
            history: the tokens before them, `[..., H]`; see `NGramScheme.ids`.

        Raises:
            TypeError: tokens or history of another type.
            ValueError: tokens that the scheme does not know, or a history of another shape.
        """
        return self.scheme.ids(tokens, history)

    def stage(self, features: Tensor, copies: Copies) -> StagedRows:
        """Begins to read the rows of tokens ahead, for `StagingDataLoader`."""
        return self.table.stage(self.ids(features), copies)

    def forward(self, hidden: Tensor, tokens: Tensor | StagedRows, history: Tensor | None = None) -> Tensor:
        """Returns the hidden states with what the memory adds, `[..., T, hidden_dim]`.

        Args:
            hidden: `[..., T, hidden_dim]`.
            tokens: int64 `[..., T]`, one text a row; or the rows that a `StagingDataLoader` gave for them.
            history: the tokens before them, `[..., H]`, if a text comes in pieces; see `NGramScheme.ids`.

        Raises:
            TypeError: a history beside rows that were staged; further as `ids`.
            ValueError: hidden states of other tokens, or of another `hidden_dim`; further as `ids`.
        """
        if isinstance(tokens, StagedRows) and history is not None:
            raise TypeError("NGramMemory: staged rows take no history, they were read before")
        rows = self.table(tokens if isinstance(tokens, StagedRows) else self._ids_on_all_ranks(tokens, history))
        remembered = rows.flatten(-2).to(hidden.dtype)
        self._check_shape(hidden, remembered)
        shape = hidden.shape[-1:]
        agreement = functional.rms_norm(hidden, shape) * functional.rms_norm(self.key(remembered), shape)
        gate = torch.sigmoid(agreement.sum(-1, keepdim=True) / shape[0] ** 0.5)
        return hidden + gate * self.value(remembered)

    def _ids_on_all_ranks(self, tokens: Tensor, history: Tensor | None) -> Tensor:
        """The ids of `ids`; an error of one rank is one on all, which would wait for its lookup."""
        with failing_together(self.table.tables()) if self.table.table.is_sharded else nullcontext():
            return self.ids(tokens, history)

    def _check_shape(self, hidden: Tensor, remembered: Tensor) -> None:
        expected = (*remembered.shape[:-1], self.value.out_features)
        if hidden.dim() != len(expected) or any(map(operator.ne, hidden.shape, expected)):
            tokens, got = list(expected[:-1]), list(hidden.shape)
            raise ValueError(f"NGramMemory: tokens of shape {tokens} need hidden states of {list(expected)}, got {got}")

    def get_extra_state(self) -> Tensor:
        """The meaning of the rows, for `state_dict`, int64.

        Without a scheme `n`, `heads`, `rows` and `hash_seed`; else the bytes of the scheme's meaning as JSON.
        """
        return state_of(self.scheme)

    def set_extra_state(self, state: Any) -> None:
        """Checks that the rows of a state mean the same here.

        Raises:
            TypeError: the state is no such tensor.
            ValueError: the rows belong to other n-grams or hash functions.
        """
        if words := difference(meaning_of(state), self.scheme.meaning()):
            given, own = words
            raise ValueError(f"NGramMemory: the state is of a memory with {given}, but this one has {own}")


def _scheme_of(scheme: NGramScheme | None, rows: int | None, numbers: dict[str, int]) -> NGramScheme:
    """Returns the scheme of a memory, which is given or follows from numbers.

    Raises:
        TypeError: no scheme, or one beside numbers.
        ValueError: a number out of its range.
    """
    if scheme is None:
        return RecStoreNGrams(rows=rows, **numbers)  # type: ignore[arg-type]
    if not isinstance(scheme, NGramScheme):
        raise TypeError(f"NGramMemory: scheme must be an NGramScheme, got {type(scheme).__name__}")
    given = {name: number for name, number in numbers.items() if not isinstance(number, _Default)}
    if rows is not None:
        given["rows"] = rows
    if given:
        words = ", ".join(f"{name} {number}" for name, number in given.items())
        raise TypeError(f"NGramMemory: a scheme takes the place of rows, n, heads and hash_seed, got {words} beside it")
    return scheme
