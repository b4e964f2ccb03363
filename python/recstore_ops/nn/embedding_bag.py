"""`DistEmbeddingBag`: `torch.nn.EmbeddingBag` over a table that grows by id."""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULT_LR, DEFAULTS, TableOptions
from recstore_ops.nn.dist_embedding import InitFunc, TableModule
from recstore_ops.nn.functional import check_mode, embedding_bag
from recstore_ops.nn.padding import PaddingIdx


class DistEmbeddingBag(TableModule):
    """Pooled rows of bags of ids: `[N]` ids and `[B]` offsets give `[B, embedding_dim]`.

    Args:
        num_embeddings: ids are below it; `None` for an open vocabulary, in which every int64 is an id.
        embedding_dim: elements a row.
        name: the table's name. Modules with one name and one configuration share its rows.
        mode: `sum`, `mean` or `max`.
        padding_idx: an id that no bag counts, or several.
        include_last_offset: whether `offsets` also holds the end of the last bag.
        max_norm: refused, as in `DistEmbedding`.
        scale_grad_by_freq: as in `DistEmbedding`, and so are `init_func`, `lr` and `output_dtype`; not for mode `max`.
        **options: see `recstore_ops.TableOptions`.

    Raises:
        TypeError: an option of another name.
        ValueError: an unknown mode, or an argument that is not supported; further as `DistEmbedding`.
    """

    __module__ = "recstore_ops"

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        name: str,
        mode: Literal["sum", "mean", "max"] = "mean",
        padding_idx: PaddingIdx = None,
        include_last_offset: bool = False,
        *,
        max_norm: float | None = None,
        scale_grad_by_freq: bool = False,
        init_func: InitFunc | None = None,
        lr: float = DEFAULT_LR,
        output_dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        check_mode(mode, scale_grad_by_freq)
        super().__init__(
            num_embeddings,
            embedding_dim,
            name,
            init_func,
            lr,
            padding_idx=padding_idx,
            max_norm=max_norm,
            scale_grad_by_freq=scale_grad_by_freq,
            output_dtype=output_dtype,
            **options,
        )
        self.mode: Literal["sum", "mean", "max"] = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows of each bag: `[B, embedding_dim]`, `output_dtype`; see `recstore_ops.embedding_bag`."""
        if isinstance(per_sample_weights, Tensor) and per_sample_weights.dtype == self.output_dtype:
            per_sample_weights = per_sample_weights.to(torch.float32)
        pooled = embedding_bag(
            input,
            self.looked_up(),
            offsets,
            self.mode,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
            self._scale_grad_by_freq,
        )
        return pooled.to(self.output_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    @property
    def _trace(self) -> list[tuple[str, Tensor, Tensor]]:
        """The gradients collected and not yet applied, as `(table_name, ids [U], grads [U, dim])`."""
        return self.table.collected()
