"""`NGramMemory` against its equation over `nn.Embedding`, and what its ids depend on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import NGramMemory, SparseOptimizer, checkpoint, export, load_bundle

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
HIDDEN, ROWS, DIM = 12, 40, 5
ADAGRAD = {"kind": "adagrad", "lr": 0.1, "convention": "torch"}


def memory(name: str, **options: Any) -> NGramMemory:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"n": 3, "heads": 2, "optimizer": ADAGRAD, **options}
    made = NGramMemory(HIDDEN, ROWS, DIM, name, **chosen)
    nn.init.normal_(made.value.weight)
    return made


def texts(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, HIDDEN, generator=generator), torch.randint(30, shape, generator=generator)


def by_equation(of: NGramMemory, rows: nn.Embedding, hidden: Tensor, tokens: Tensor) -> Tensor:
    remembered = rows(of.ids(tokens)).flatten(-2)
    key, value = remembered @ of.key.weight.T, remembered @ of.value.weight.T

    def norm(each: Tensor) -> Tensor:
        return each / (each.square().mean(-1, keepdim=True) + torch.finfo(each.dtype).eps).sqrt()

    gate = torch.sigmoid((norm(hidden) * norm(key)).sum(-1) / HIDDEN**0.5)
    return hidden + gate[..., None] * value


def test_a_memory_trains_as_its_equation_over_a_matrix(table_name: TableName) -> None:
    ours, theirs = memory(table_name()), memory(table_name())
    rows = nn.Embedding(4 * ROWS, DIM, _weight=ours.table(torch.arange(4 * ROWS)).detach().clone())
    optimizers = [
        (SparseOptimizer(modules=[ours.table]), torch.optim.SGD([ours.key.weight, ours.value.weight], lr=0.1)),
        (
            torch.optim.Adagrad(rows.parameters(), lr=0.1, eps=1e-10),
            torch.optim.SGD([theirs.key.weight, theirs.value.weight], lr=0.1),
        ),
    ]
    hidden, tokens = texts(3, 7)
    for _ in range(5):
        outputs = ours(hidden, tokens), by_equation(theirs, rows, hidden, tokens)
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
        for output, both in zip(outputs, optimizers, strict=True):
            for each in both:
                each.zero_grad()
            output.square().mean().backward()
            for each in both:
                each.step()
    torch.testing.assert_close(ours.table(torch.arange(4 * ROWS)), rows.weight, rtol=0, atol=1e-4)


def test_a_new_memory_changes_no_hidden_state(table_name: TableName) -> None:
    hidden, tokens = texts(2, 6)
    assert torch.equal(NGramMemory(HIDDEN, ROWS, DIM, table_name())(hidden, tokens), hidden)


def test_ids_depend_on_the_tokens_of_their_n_grams_alone(table_name: TableName) -> None:
    module = memory(table_name())
    _, tokens = texts(2, 9)
    ids = module.ids(tokens)
    assert ids.shape == (2, 9, 4)
    assert torch.equal(ids.min(0).values.min(0).values // ROWS, torch.arange(4)), "each function has its own rows"
    assert torch.equal(ids.max(0).values.max(0).values // ROWS, torch.arange(4))
    assert torch.equal(module.ids(tokens[1]), ids[1]), "texts do not touch"
    changed = tokens.clone()
    changed[:, 4] += 1
    differs = (module.ids(changed) != ids).any(0)
    assert not differs[:4].any()
    assert not differs[7:].any()
    assert not differs[6, :2].any(), "two tokens later no 2-gram is another"
    assert differs[4].any()


def test_functions_of_other_seeds_are_others(table_name: TableName) -> None:
    _, tokens = texts(4, 9)
    one, same, other = (memory(table_name(), hash_seed=seed).ids(tokens) for seed in (3, 3, 9))
    assert torch.equal(one, same)
    assert (one == other).float().mean() < 0.1


def test_a_memory_is_compiled_whole(table_name: TableName) -> None:
    module = memory(table_name())
    hidden, tokens = texts(2, 6)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, tokens), module(hidden, tokens))


def test_a_memory_is_exported(table_name: TableName, tmp_path: Path) -> None:
    module = memory(table_name()).eval()
    hidden, tokens = texts(2, 6)
    export(module, (hidden, tokens), tmp_path / "bundle")
    with torch.no_grad():
        expected = module(hidden, tokens)
    torch.testing.assert_close(load_bundle(tmp_path / "bundle")(hidden, tokens), expected)


def test_a_memory_goes_on_from_a_checkpoint_to_the_bit(table_name: TableName, tmp_path: Path) -> None:
    name = table_name()
    hidden, tokens = texts(3, 7)

    def step(module: NGramMemory) -> Tensor:
        output = module(hidden, tokens)
        functional.mse_loss(output, hidden.flip(0)).backward()
        SparseOptimizer(modules=[module.table]).step()
        return output.detach()

    module = memory(name)
    step(module)
    checkpoint.save(tmp_path)
    expected = [step(module), step(module)]
    checkpoint.load(tmp_path, tables=[name])
    again = memory(name, on_existing="share")
    assert all(torch.equal(step(again), each) for each in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1}, "NGramMemory: expected n of at least 2, got 1"),
        ({"heads": 0}, "NGramMemory: expected heads of at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(options: dict[str, int], message: str, table_name: TableName) -> None:
    with pytest.raises(ValueError, match=message):
        memory(table_name(), **options)
    with pytest.raises(ValueError, match="expected rows of at least 1, got 0"):
        NGramMemory(HIDDEN, 0, DIM, table_name())


def test_an_unknown_option_is_refused(table_name: TableName) -> None:
    with pytest.raises(TypeError, match="head"):
        NGramMemory(HIDDEN, ROWS, DIM, table_name(), head=3)  # type: ignore[call-arg]
