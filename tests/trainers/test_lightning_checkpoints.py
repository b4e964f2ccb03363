"""Checkpoints of Lightning: programs over tables go on from them as those over `nn.Embedding` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clicks import Outcome, assert_same
from conftest import drop_tables
from lightning_programs import EPOCHS, Automatic, Ema, Manual, Thawing, fitted, outcome


def resumed(kind: type[Automatic], over_tables: bool, path: Path, **options: Any) -> Outcome:
    """Trains for two epochs and saves; then a model made anew goes on for two more."""
    module, first = fitted(kind, over_tables, **options)
    first.save_checkpoint(path)
    del module, first
    drop_tables()
    return outcome(kind, over_tables, path=path, epochs=2 * EPOCHS, **options)


@pytest.mark.parametrize(
    ("kind", "callbacks"), [(Automatic, []), (Manual, []), (Automatic, [Ema]), (Manual, [Ema]), (Automatic, [Thawing])]
)
def test_training_goes_on_from_a_checkpoint(kind: type[Automatic], callbacks: Any, tmp_path: Path) -> None:
    expected = resumed(kind, False, tmp_path / "dense.ckpt", callbacks=callbacks)
    assert_same(resumed(kind, True, tmp_path / "tables.ckpt", callbacks=callbacks), expected)
    if not callbacks:
        whole = outcome(kind, False, epochs=2 * EPOCHS)
        assert_same(expected, whole._replace(losses=whole.losses[-len(expected.losses) :]))


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_a_checkpoint_holds_tensors_and_plain_values_alone(kind: type[Automatic], tmp_path: Path) -> None:
    module, first = fitted(kind, True)
    expected = Outcome.of(module.model, [])
    first.save_checkpoint(tmp_path / "tables.ckpt")
    torch.load(tmp_path / "tables.ckpt", weights_only=True)
    del module, first
    drop_tables()
    read = kind.load_from_checkpoint(tmp_path / "tables.ckpt", over_tables=True)
    assert_same(Outcome.of(read.model, []), expected)
