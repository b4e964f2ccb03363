"""The model of a finished run as a bundle, whose inputs are tensors with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.serving import Bundle, EncodingName, export, load_bundle
from recstore_ops.training.data.batch import Batch, offsets_of_lengths, regroup
from recstore_ops.training.run.choices import RETRIEVAL
from recstore_ops.training.run.finished_run import LoadedRun

EXAMPLE_ROWS = 4096


class OverTensors(nn.Module):
    """A model of a run that takes the tensors of a batch.

    B rows, F fields, N ids of all rows together, J dense features.

    Args:
        model: takes a `Batch`.
        num_fields: F.
        retrieves: whether it gives scores and vectors, in place of log-odds.
    """

    def __init__(self, model: nn.Module, num_fields: int, *, retrieves: bool) -> None:
        super().__init__()
        self.model: Any = model
        self.num_fields = num_fields
        self.retrieves = retrieves

    def forward(
        self, ids: Tensor, lengths: Tensor | None = None, values: Tensor | None = None, dense: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns `logits` and `probabilities`, float32 [B]; of a model that retrieves, `scores`, float32 [B], and
        `query_vectors` and `item_vectors`.

        Args:
            ids: int64 [B, F]; with `lengths`, [N]: row by row, and field by field within a row.
            lengths: int64 [B, F], how many ids each field has.
            values: float32, of the shape of `ids`; None for ones.
            dense: float32 [B, J].
        """
        rows = ids.shape[0] if lengths is None else lengths.shape[0]
        labels = torch.empty(rows, dtype=torch.float32, device=ids.device)
        offsets = None if lengths is None else offsets_of_lengths(lengths.reshape(-1))
        flat = None if values is None else values.reshape(-1)
        batch = Batch(ids.reshape(-1), labels, self.num_fields, offsets, flat, dense)
        if self.retrieves:
            vectors = {"query_vectors": self.model.query_vectors(batch), "item_vectors": self.model.item_vectors(batch)}
            return {"scores": self.model(batch), **vectors}
        logits = self.model(batch)
        return {"logits": logits, "probabilities": logits.double().sigmoid().float()}


def tensors_of(batch: Batch, like: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Returns the arguments of `OverTensors` for a batch, by name.

    Args:
        batch: with or without lengths, values and dense features.
        like: the names to give; None for those that the batch has.

    Raises:
        ValueError: `like` has no place for lengths, values or dense features that the batch has.
    """
    names = _names(batch) if like is None else set(like)
    if missing := _names(batch) - names:
        raise ValueError(
            f"the rows have {' and '.join(sorted(missing))}, the bundle takes only {', '.join(sorted(names))}"
        )
    is_ragged = "lengths" in names
    every = {
        "ids": batch.ids if is_ragged else batch.ids.view(-1, batch.num_fields),
        "lengths": batch.offsets_or_ones().diff().view(-1, batch.num_fields),
        "values": batch.values_or_ones() if is_ragged else batch.values_or_ones().view(-1, batch.num_fields),
        "dense": batch.dense,
    }
    return {name: tensor for name, tensor in every.items() if name in names and tensor is not None}


def _names(batch: Batch) -> set[str]:
    optional = {"lengths": batch.offsets, "values": batch.values, "dense": batch.dense}
    return {"ids", *(name for name, tensor in optional.items() if tensor is not None)}


def export_run(
    run: LoadedRun,
    rows: Iterable[Batch],
    directory: Path,
    *,
    encoding: EncodingName | Mapping[str, EncodingName] = "float32",
    compiled: bool = False,
    replace: bool = False,
) -> Bundle:
    """Writes the model of a run as a bundle, and returns it, opened.

    The bundle takes ids as [B, F] if the first rows have one id in every field, else bags of ids with lengths. It takes
    values if one of the first rows has a value other than 1, and dense features if the run has them.

    Args:
        run: of `load`.
        rows: like the rows of later requests; the first 4,096 are examined, and are not kept.
        directory: of the bundle.
        encoding: how rows are kept, of all tables or by the names that the model calls them.
        compiled: whether to compile the program too; then the compiled one is returned.
        replace: whether to overwrite an existing bundle.

    Raises:
        ValueError: there are fewer than two rows; further as `export`.
        OSError, RuntimeError: as `export`.
    """
    example = first_rows(rows)
    model = OverTensors(run.model, len(run.form.fields), retrieves=run.config.model in RETRIEVAL).eval()
    if not isinstance(encoding, str):
        encoding = {run.table(name).name: kind for name, kind in encoding.items()}
    written = export(model, tensors_of(example), directory, encoding=encoding, compiled=compiled, replace=replace)
    return load_bundle(written, compiled=compiled, trusted=True)  # It was just written.


def first_rows(rows: Iterable[Batch]) -> Batch:
    """Returns the first 4,096 rows, or all if there are fewer.

    Raises:
        ValueError: there are fewer than two rows, too few to see which sizes vary.
    """
    first = next(regroup(rows, EXAMPLE_ROWS), None)
    if first is None or len(first) < 2:
        raise ValueError("an example of at least 2 rows is needed")
    return first
