"""`replace_embeddings(..., on_existing="reset")`: a call that fails takes no rows from tables that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding, get_kv_client, replace_embeddings, table_names
from recstore_ops.config.config_file import active_config
from recstore_ops.transfer import replacing

pytestmark = [
    pytest.mark.usefixtures("tables_are_dropped"),
    pytest.mark.tier("quick"),
    pytest.mark.embedded_only("servers drop no table for on_existing"),
]

IDS = torch.arange(6)


def model_of(item: nn.Module | None = None) -> nn.ModuleDict:
    return nn.ModuleDict({"user": nn.Embedding(6, 4), "item": item or nn.Embedding(6, 4)})


def trained(prefix: str) -> Tensor:
    """The rows of the tables of a model that is gone."""
    model: Any = model_of()
    replace_embeddings(model, prefix=prefix)
    return torch.stack([module.weight[IDS] for module in model.values()])


def rows_of(prefix: str) -> Tensor:
    modules = [DistEmbedding(6, 4, f"{prefix}{name}", on_existing="share") for name in ("user", "item")]
    return torch.stack([module.weight[IDS] for module in modules])


REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "max and frequency": (
        nn.EmbeddingBag(6, 4, mode="max", scale_grad_by_freq=True),
        {},
        '"item": scale_grad_by_freq goes with mode "sum" or "mean", and its mode is "max"',
    ),
    "no elements": (nn.Embedding(6, 0), {}, r'"item": a row has at least one element, and .* shape \(6, 0\)'),
    "no rows": (nn.Embedding(0, 4), {}, '"item": a table with a bound has at least one row, and its weight has none'),
    "a limit": (nn.Embedding(100_000, 64), {"memory_limit": 4 << 20}, "memory limit of 4194304 bytes"),
    "an optimizer": (nn.Embedding(6, 4), {"optimizer": "adm"}, "adm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_refused_takes_no_rows_from_tables(name: str, prefix: str) -> None:
    item, options, message = REFUSED[name]
    rows, names, model = trained(prefix), table_names(), model_of(item)
    before = list(model.values())
    with pytest.raises((ValueError, RuntimeError), match=message):
        replace_embeddings(model, prefix=prefix, on_existing="reset", **options)
    assert table_names() == names
    assert list(model.values()) == before
    assert torch.equal(rows_of(prefix), rows)


def test_a_table_of_another_module_of_the_model_keeps_the_rows_of_both(prefix: str) -> None:
    rows = trained(prefix)
    model: Any = model_of()
    model["own"] = DistEmbedding(6, 4, f"{prefix}item", on_existing="share")
    with pytest.raises(ValueError, match=f'table "{prefix}item" is that of another module of this model'):
        replace_embeddings(model, prefix=prefix, on_existing="reset")
    assert torch.equal(model["own"].weight[IDS], rows[1])
    assert torch.equal(rows_of(prefix), rows)


def test_a_model_that_is_bound_refuses_once_another_took_its_tables(prefix: str) -> None:
    trained(prefix)
    before: Any = model_of()
    replace_embeddings(before, prefix=prefix, on_existing="share")
    replace_embeddings(model_of(), prefix=prefix, on_existing="reset")
    with pytest.raises(RuntimeError, match=f'table "{prefix}item" was given up: a module made later'):
        before["item"](IDS)


def test_what_the_configuration_file_refuses_takes_no_rows(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = trained(prefix)
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"embedding_tables": {f"{prefix}item": {"embedding_dim": 8}}}))
    with monkeypatch.context() as patched:
        patched.setenv("RECSTORE_CONFIG", str(path))
        config: Any = active_config(reload=True)
        with pytest.raises(ValueError, match=r'table "trial of .*item" has embedding_dim 8'):
            replace_embeddings(model_of(), prefix=prefix, on_existing="reset")
        assert list(config.embedding_tables) == [f"{prefix}item"]
    active_config(reload=True)
    assert torch.equal(rows_of(prefix), rows)


def test_all_tables_begin_anew_where_nothing_fails(prefix: str) -> None:
    trained(prefix)
    names = table_names()
    model: Any = model_of()
    weights = torch.stack([module.weight.detach().clone() for module in model.values()])
    replace_embeddings(model, prefix=prefix, on_existing="reset")
    assert table_names() == names
    del model
    assert torch.equal(rows_of(prefix), weights)


def interrupted(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("choice", [None, "reset"])
def test_an_interrupted_call_leaves_no_tables_behind(choice: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = trained(prefix) if choice else None
    model: Any = model_of()
    made, names = replacing.module_over_table, table_names()
    monkeypatch.setattr(
        replacing,
        "module_over_table",
        lambda module, *args, **options: (interrupted if module is model["item"] else made)(module, *args, **options),
    )
    with pytest.raises(KeyboardInterrupt):
        replace_embeddings(model, prefix=prefix, on_existing=choice)
    assert table_names() == names
    assert [type(module) for module in model.values()] == [nn.Embedding, nn.Embedding]
    assert rows is None or torch.equal(rows_of(prefix), rows)


def test_a_table_of_another_module_that_was_dropped_is_found_before_anything_changes(prefix: str) -> None:
    model: Any = model_of(DistEmbedding(6, 4, f"{prefix}item"))
    get_kv_client().drop(f"{prefix}item")
    names = table_names()
    with pytest.raises(RuntimeError, match=f'table "{prefix}item" was dropped'):
        replace_embeddings(model, prefix=prefix)
    assert table_names() == names
    assert isinstance(model["user"], nn.Embedding)
