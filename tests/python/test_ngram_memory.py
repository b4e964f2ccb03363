"""`NGramMemory` against its equation over `nn.Embedding`, and what its ids depend on."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import NGramMemory, SparseOptimizer, checkpoint, export, load_bundle, ngram_ids, table_names

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


NO_MEMORY: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "n of 1": ({"n": 1}, ValueError, "expected n from 2 to 256, got 1"),
    "n of 257": ({"n": 257}, ValueError, "expected n from 2 to 256, got 257"),
    "a float n": ({"n": 2.0}, TypeError, "n must be an integer, got 2.0"),
    "no heads": ({"heads": 0}, ValueError, "expected heads from 1 to 1024, got 0"),
    "many heads": ({"heads": 1025}, ValueError, "expected heads from 1 to 1024, got 1025"),
    "NaN heads": ({"heads": float("nan")}, TypeError, "heads must be an integer, got nan"),
    "no rows": ({"rows": 0}, ValueError, f"expected rows from 1 to {(2**63 - 1) // 4}, got 0"),
    "rows beyond int64": ({"rows": 2**61}, ValueError, f"expected rows from 1 to {(2**63 - 1) // 4}, got {2**61}"),
    "a float of rows": ({"rows": 1e6}, TypeError, "rows must be an integer, got 1000000.0"),
    "no hidden state": ({"hidden_dim": 0}, ValueError, "expected hidden_dim from 1 to 9223372036854775807, got 0"),
    "less than none": ({"hidden_dim": -1}, ValueError, "expected hidden_dim from 1 to 9223372036854775807, got -1"),
    "no dim": ({"dim": 0}, ValueError, "expected dim from 1 to 9223372036854775807, got 0"),
    "a float seed": ({"hash_seed": 1.5}, TypeError, "hash_seed must be an integer, got 1.5"),
    "no seed": ({"hash_seed": None}, TypeError, "hash_seed must be an integer, got None"),
    "a seed beyond int64": ({"hash_seed": 2**63}, ValueError, f"hash_seed must be an int64, got {2**63}"),
}


@pytest.mark.parametrize(("options", "error", "words"), NO_MEMORY.values(), ids=NO_MEMORY)
def test_wrong_numbers_are_refused_before_there_is_a_table(
    options: dict[str, Any], error: type[Exception], words: str, table_name: TableName
) -> None:
    name = table_name()
    chosen = {"hidden_dim": HIDDEN, "rows": ROWS, "dim": DIM, "name": name, **options}
    with pytest.raises(error, match=f"^NGramMemory: {re.escape(words)}$"):
        NGramMemory(**chosen)
    assert name not in table_names()


@pytest.mark.parametrize("rows", [2**63 - 1, 2**62 + 1])
def test_rows_up_to_int64_have_ids(rows: int, table_name: TableName) -> None:
    module = NGramMemory(HIDDEN, rows, DIM, table_name(), n=2, heads=1)
    _, tokens = texts(2, 6)
    assert module.ids(tokens).shape == (2, 6, 1)
    most = NGramMemory(HIDDEN, (2**63 - 1) // 4, DIM, table_name(), n=3, heads=2)
    assert (most.ids(tokens) // (most.scheme.num_rows // 4) == torch.arange(4)).all()


def test_seeds_go_on_in_64_bits(table_name: TableName) -> None:
    _, tokens = texts(2, 6)
    last = memory(table_name(), hash_seed=2**63 - 2).ids(tokens)
    first = memory(table_name(), n=2, hash_seed=-(2**63))
    assert torch.equal(last[..., 2:], ngram_ids(tokens, 3, 2, ROWS, -(2**63)) + torch.tensor([2, 3]) * ROWS)
    assert torch.equal(first.ids(tokens), ngram_ids(tokens, 2, 2, ROWS, -(2**63)) + torch.tensor([0, 1]) * ROWS)


SHAPES = [((2, 5, HIDDEN), (2, 1)), ((2, 1, HIDDEN), (2, 5)), ((2, 5, HIDDEN), (1, 5)), ((5, HIDDEN), (2, 5))]


@pytest.mark.parametrize(("hidden", "tokens"), [*SHAPES, ((2, 5, 1), (2, 5)), ((2, 5, HIDDEN + 1), (2, 5))])
def test_hidden_states_of_other_tokens_are_refused(
    hidden: tuple[int, ...], tokens: tuple[int, ...], table_name: TableName
) -> None:
    module = memory(table_name())
    words = f"tokens of shape {list(tokens)} need hidden states of {[*tokens, HIDDEN]}, got {list(hidden)}"
    given = torch.randn(hidden), torch.zeros(tokens, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"^NGramMemory: {re.escape(words)}$"):
        module(*given)
    with pytest.raises(Exception, match=re.escape(words)):
        torch.export.export(module.eval(), given, strict=False)


def test_shapes_stay_dynamic(table_name: TableName) -> None:
    module = memory(table_name()).eval()
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = torch.export.export(module, texts(2, 6), dynamic_shapes=(sizes, sizes), strict=False).module()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 6), (3, 9)):
        given = texts(*shape)
        with torch.no_grad():
            torch.testing.assert_close(program(*given), module(*given))
            torch.testing.assert_close(compiled(*given), module(*given))


def test_a_state_of_other_hash_functions_is_refused(table_name: TableName) -> None:
    state = memory(table_name()).state_dict()
    memory(table_name()).load_state_dict(state)
    own = f"n 3, heads 2, rows {ROWS}, hash_seed 0"
    others = [{"hash_seed": 5}, {"n": 5, "heads": 1}, {"n": 2, "heads": 4}]
    for options in others:
        words = ", ".join(
            f"{name} {value}" for name, value in {"n": 3, "heads": 2, "rows": ROWS, "hash_seed": 0, **options}.items()
        )
        with pytest.raises(
            ValueError, match=re.escape(f"the state is of a memory with {own}, but this one has {words}")
        ):
            memory(table_name(), **options).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        memory(table_name()).load_state_dict({key: value for key, value in state.items() if "extra_state" not in key})


def test_a_copy_and_a_pickle_are_the_same_memory(table_name: TableName) -> None:
    module, given = memory(table_name()), texts(2, 6)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(*given), module(*given))
        again.load_state_dict(module.state_dict())


def test_an_unknown_option_is_refused(table_name: TableName) -> None:
    with pytest.raises(TypeError, match="head"):
        NGramMemory(HIDDEN, ROWS, DIM, table_name(), head=3)  # type: ignore[call-arg]
