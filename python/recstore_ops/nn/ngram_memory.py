"""`NGramMemory`: what a table remembers of the n-grams of a text, let into the hidden states of a language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULTS, TableOptions
from recstore_ops.nn.copies import Copies
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.staging import StagedRows
from recstore_ops.ops.made_ids import ngram_ids


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
        n: the length of the longest n-grams; at least 2.
        heads: hash functions of each length.
        hash_seed: of the hash functions; function k has `hash_seed + k`.
        **options: see `recstore_ops.TableOptions`.

    Raises:
        ValueError: `n` below 2, or `rows` or `heads` below 1; further as `DistEmbedding`.
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
        for what, value, least in (("n", n, 2), ("rows", rows, 1), ("heads", heads, 1)):
            if value < least:
                raise ValueError(f"NGramMemory: expected {what} of at least {least}, got {value}")
        self.n, self.heads, self.num_rows, self.hash_seed = n, heads, rows, hash_seed
        functions = (n - 1) * heads
        self.table = DistEmbedding(functions * rows, dim, name, **options)
        self.key = nn.Linear(functions * dim, hidden_dim, bias=False)
        self.value = nn.Linear(functions * dim, hidden_dim, bias=False)
        nn.init.zeros_(self.value.weight)

    def ids(self, tokens: Tensor) -> Tensor:
        """Returns the ids of the n-grams that end at each token, int64 `[..., T, (n - 1) * heads]`.

        They depend on the tokens alone, so that `StagingDataLoader` reads rows while the batch before is trained on.

        Args:
            tokens: int64 `[..., T]`, one text a row.
        """
        hashes = [
            ngram_ids(tokens, length, self.heads, self.num_rows, self.hash_seed + (length - 2) * self.heads)
            for length in range(2, self.n + 1)
        ]
        functions = len(hashes) * self.heads
        first_ids = torch.arange(0, functions * self.num_rows, self.num_rows, dtype=torch.int64, device=tokens.device)
        return torch.cat(hashes, dim=-1) + first_ids

    def stage(self, features: Tensor, copies: Copies) -> StagedRows:
        """Begins to read the rows of tokens ahead, for `StagingDataLoader`."""
        return self.table.stage(self.ids(features), copies)

    def forward(self, hidden: Tensor, tokens: Tensor | StagedRows) -> Tensor:
        """Returns the hidden states with what the memory adds, `[..., T, hidden_dim]`.

        Args:
            hidden: `[..., T, hidden_dim]`.
            tokens: int64 `[..., T]`, one text a row; or the rows that a `StagingDataLoader` gave for them.
        """
        rows = self.table(tokens if isinstance(tokens, StagedRows) else self.ids(tokens))
        remembered = rows.flatten(-2).to(hidden.dtype)
        shape = hidden.shape[-1:]
        agreement = functional.rms_norm(hidden, shape) * functional.rms_norm(self.key(remembered), shape)
        gate = torch.sigmoid(agreement.sum(-1, keepdim=True) / shape[0] ** 0.5)
        return hidden + gate * self.value(remembered)
