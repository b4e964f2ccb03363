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
from recstore_ops.nn.copies import Copies
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.staging import StagedRows
from recstore_ops.ops.feature_hashing import ngram_ids
from recstore_ops.ops.integers import as_int64
from recstore_ops.sharding.rows import failing_together


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
        rows: the most rows of each hash function.
        dim: elements of a row.
        name: the table's name.
        n: the length of the longest n-grams, from 2 to 256.
        heads: hash functions of each length, from 1 to 1,024.
        hash_seed: an int64, of the hash functions; function k has `hash_seed + k`, in 64 bits.
        **options: see `recstore_ops.TableOptions`.

    `state_dict` has `n`, `heads`, `rows` and `hash_seed` beside the rows, and loading one with others is an error.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number out of its range, or more rows than int64 has ids; further as `DistEmbedding`.
    """

    __module__ = "recstore_ops"

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        hidden_dim: int,
        rows: int,
        dim: int,
        name: str,
        *,
        n: int = 3,
        heads: int = 2,
        hash_seed: int = 0,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__()
        hidden_dim, dim = _from(1, 2**63 - 1, "hidden_dim", hidden_dim), _from(1, 2**63 - 1, "dim", dim)
        self.n, self.heads = _from(2, 256, "n", n), _from(1, 1024, "heads", heads)
        functions = (self.n - 1) * self.heads
        # Functions have ranges of ids one after another in the table, and the last id has to fit into int64.
        self.num_rows = _from(1, (2**63 - 1) // functions, "rows", rows)
        self.hash_seed = as_int64("NGramMemory", "hash_seed", hash_seed)
        self.table = DistEmbedding(functions * self.num_rows, dim, name, **options)
        self.key = nn.Linear(functions * dim, hidden_dim, bias=False)
        self.value = nn.Linear(functions * dim, hidden_dim, bias=False)
        # A new memory adds nothing, so that it may be put into a model that is trained already.
        nn.init.zeros_(self.value.weight)

    def ids(self, tokens: Tensor) -> Tensor:
        """Returns the ids of the n-grams that end at each token, int64 `[..., T, (n - 1) * heads]`.

        They depend on the tokens alone, so that `StagingDataLoader` reads rows while the batch before is trained on.

        Args:
            tokens: int64 `[..., T]`, one text a row.
        """
        hashes = [
            ngram_ids(tokens, length, self.heads, self.num_rows, _wrapped(self.hash_seed + (length - 2) * self.heads))
            for length in range(2, self.n + 1)
        ]
        functions = torch.arange(len(hashes) * self.heads, dtype=torch.int64, device=tokens.device)
        return torch.cat(hashes, dim=-1) + functions * self.num_rows

    def stage(self, features: Tensor, copies: Copies) -> StagedRows:
        """Begins to read the rows of tokens ahead, for `StagingDataLoader`."""
        return self.table.stage(self.ids(features), copies)

    def forward(self, hidden: Tensor, tokens: Tensor | StagedRows) -> Tensor:
        """Returns the hidden states with what the memory adds, `[..., T, hidden_dim]`.

        Args:
            hidden: `[..., T, hidden_dim]`.
            tokens: int64 `[..., T]`, one text a row; or the rows that a `StagingDataLoader` gave for them.

        Raises:
            ValueError: hidden states of other tokens, or of another `hidden_dim`.
        """
        rows = self.table(tokens if isinstance(tokens, StagedRows) else self._ids_on_all_ranks(tokens))
        remembered = rows.flatten(-2).to(hidden.dtype)
        self._check_shape(hidden, remembered)
        shape = hidden.shape[-1:]
        agreement = functional.rms_norm(hidden, shape) * functional.rms_norm(self.key(remembered), shape)
        gate = torch.sigmoid(agreement.sum(-1, keepdim=True) / shape[0] ** 0.5)
        return hidden + gate * self.value(remembered)

    def _ids_on_all_ranks(self, tokens: Tensor) -> Tensor:
        """The ids of `ids`; an error of one rank is one on all, which would wait for its lookup."""
        with failing_together(self.table.tables()) if self.table.table.is_sharded else nullcontext():
            return self.ids(tokens)

    def _check_shape(self, hidden: Tensor, remembered: Tensor) -> None:
        expected = (*remembered.shape[:-1], self.value.out_features)
        if hidden.dim() != len(expected) or any(map(operator.ne, hidden.shape, expected)):
            tokens, got = list(expected[:-1]), list(hidden.shape)
            raise ValueError(f"NGramMemory: tokens of shape {tokens} need hidden states of {list(expected)}, got {got}")

    def get_extra_state(self) -> Tensor:
        """The meaning of the rows, for `state_dict`: `n`, `heads`, `rows` and `hash_seed`, int64 [4]."""
        return torch.tensor(list(self._meaning().values()), dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Checks that the rows of a state mean the same here.

        Raises:
            TypeError: the state is no such tensor.
            ValueError: the rows belong to other n-grams or hash functions.
        """
        own = self._meaning()
        if not isinstance(state, Tensor) or state.shape != (len(own),):
            raise TypeError(f"NGramMemory: expected a state of {', '.join(own)}, got {state!r}")
        given = dict(zip(own, state.tolist(), strict=True))
        if given != own:
            raise ValueError(
                f"NGramMemory: the state is of a memory with {_words(given)}, but this one has {_words(own)}"
            )

    def _meaning(self) -> dict[str, int]:
        return {"n": self.n, "heads": self.heads, "rows": self.num_rows, "hash_seed": self.hash_seed}


def _from(least: int, most: int, what: str, value: Any) -> int:
    number = as_int64("NGramMemory", what, value)
    if not least <= number <= most:
        raise ValueError(f"NGramMemory: expected {what} from {least} to {most}, got {number}")
    return number


def _wrapped(number: int) -> int:
    """A sum as an int64, of which 64 bits are kept."""
    return (number + 2**63) % 2**64 - 2**63


def _words(meaning: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in meaning.items())
