"""Memories of n-grams by published schemes: rows, texts in pieces, states."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_copies import SlowCopies
from small_schemes import SCHEMES, TOKEN_MAP, deepseek_with, longcat_with, qwen_with, salted_with

from recstore_ops import (
    DeepSeekNGrams,
    NGramMemory,
    NGramScheme,
    StagingDataLoader,
    XorNGrams,
    export,
    load_bundle,
    ngram_ids,
    table_names,
)

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]

HIDDEN, DIM = 6, 3
each_scheme = pytest.mark.parametrize("kind", SCHEMES)


def memory(name: str, scheme: NGramScheme | None, **options: Any) -> NGramMemory:
    made = NGramMemory(HIDDEN, None if scheme else 40, DIM, name, scheme=scheme, optimizer="adagrad", **options)
    torch.nn.init.normal_(made.value.weight)
    return made


@each_scheme
def test_a_memory_reads_the_rows_of_its_scheme(kind: str, table_name: TableName) -> None:
    scheme = SCHEMES[kind][0]()
    module = memory(table_name(), scheme)
    tokens, hidden = torch.randint(12, (2, 7)), torch.randn(2, 7, HIDDEN)
    assert module.table.num_embeddings == scheme.num_rows
    assert torch.equal(module.ids(tokens), scheme.ids(tokens))
    whole = module(hidden, tokens)
    whole.sum().backward()
    pieces = module(hidden[:, :4], tokens[:, :4]), module(hidden[:, 4:], tokens[:, 4:], tokens[:, :4])
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    rows = module.table(scheme.ids(tokens)).flatten(-2)
    assert rows.shape == (2, 7, scheme.slots * DIM)
    assert module.key.in_features == scheme.slots * DIM


def test_ids_of_a_memory_without_a_scheme_go_on_from_a_history(table_name: TableName) -> None:
    module = memory(table_name(), None)
    tokens = torch.randint(-9, 9, (3, 8))
    whole = module.ids(tokens)
    assert torch.equal(whole[..., :2], ngram_ids(tokens, 2, 2, 40) + torch.tensor([0, 40]))
    for begin in range(9):
        assert torch.equal(module.ids(tokens[:, begin:], tokens[:, :begin]), whole[:, begin:])
        history = module.scheme.history_after(tokens[:, :begin])
        assert torch.equal(module.ids(tokens[:, begin:], history), whole[:, begin:])
    with pytest.raises(
        ValueError, match=r"^NGramMemory: tokens of shape \[3, 8\] need a history of \[3, H\], got \[8\]$"
    ):
        module.ids(tokens, tokens[0])


@pytest.mark.tier("test")
def test_a_memory_with_a_scheme_is_compiled_and_copied(table_name: TableName) -> None:
    module = memory(table_name(), deepseek_with(token_map=TOKEN_MAP))
    given = torch.randn(2, 6, HIDDEN), torch.randint(-1, 16, (2, 6))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), module(*given))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(*given), module(*given))
        again.load_state_dict(module.state_dict())


def test_a_bundle_has_the_ids_of_its_scheme(table_name: TableName, tmp_path: Path) -> None:
    module = memory(table_name(), deepseek_with(token_map=TOKEN_MAP)).eval()
    given = torch.randn(2, 6, HIDDEN), torch.randint(-1, 16, (2, 6))
    module.table.weight[torch.arange(module.scheme.num_rows)] = torch.randn(module.scheme.num_rows, DIM)
    export(module, given, tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    with torch.no_grad():
        torch.testing.assert_close(bundle(*given), module(*given))
    with pytest.raises(RuntimeError, match="DeepSeekNGrams: tokens must be from -1 to 15"):
        bundle(given[0], torch.full((2, 6), 16))


BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"rows": 40}, "rows 40"),
    "n": ({"n": 3}, "n 3"),
    "heads": ({"heads": 2}, "heads 2"),
    "hash_seed": ({"hash_seed": 0}, "hash_seed 0"),
    "all": ({"rows": 40, "n": 4, "heads": 2, "hash_seed": 1}, "n 4, heads 2, hash_seed 1, rows 40"),
}


@pytest.mark.parametrize(("options", "words"), BOTH.values(), ids=BOTH)
def test_a_scheme_beside_numbers_of_its_own_is_refused(
    options: dict[str, Any], words: str, table_name: TableName
) -> None:
    name = table_name()
    chosen = {"hidden_dim": HIDDEN, "rows": None, "dim": DIM, "name": name, "scheme": qwen_with(), **options}
    expected = f"NGramMemory: a scheme takes the place of rows, n, heads and hash_seed, got {words} beside it"
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        NGramMemory(**chosen)
    assert name not in table_names()


def test_what_is_no_scheme_is_refused(table_name: TableName) -> None:
    with pytest.raises(TypeError, match=r"^NGramMemory: scheme must be an NGramScheme, got str$"):
        NGramMemory(HIDDEN, None, DIM, table_name(), scheme="qwen")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^NGramMemory: rows must be an integer, got None$"):
        NGramMemory(HIDDEN, None, DIM, table_name())


def test_the_state_of_a_memory_without_a_scheme_is_as_before(table_name: TableName) -> None:
    state = memory(table_name(), None, hash_seed=-7).state_dict()["_extra_state"]
    assert state.dtype == torch.int64
    assert state.tolist() == [3, 2, 40, -7]


@each_scheme
def test_a_state_of_the_same_scheme_is_loaded(kind: str, table_name: TableName) -> None:
    state = memory(table_name(), SCHEMES[kind][0]()).state_dict()
    again = memory(table_name(), SCHEMES[kind][0]())
    again.load_state_dict(state)
    mean = {**state, "_extra_state": ((state["_extra_state"].bfloat16() + state["_extra_state"]) / 2).to(torch.int64)}
    again.load_state_dict(mean)


STATES: dict[str, tuple[Callable[[], NGramScheme | None], Callable[[], NGramScheme | None], str]] = {
    "another scheme": (
        qwen_with,
        longcat_with,
        "of a memory with scheme QwenNGrams, but this one has scheme LongCatNGrams",
    ),
    "no scheme": (
        lambda: None,
        qwen_with,
        "of a memory with n 3, heads 2, rows 40, hash_seed 0, but this one has scheme QwenNGrams",
    ),
    "a scheme": (
        qwen_with,
        lambda: None,
        "of a memory with scheme QwenNGrams, but this one has n 3, heads 2, rows 40, hash_seed 0",
    ),
    "another EOS": (qwen_with, lambda: qwen_with(eos=4), "of a memory with eos 3, but this one has eos 4"),
    "another pad": (deepseek_with, lambda: deepseek_with(pad=3), "of a memory with pad 2, but this one has pad 3"),
    "another layer": (
        lambda: DeepSeekNGrams.deepseek_v4_1_flash(14),
        lambda: DeepSeekNGrams.deepseek_v4_1_flash(1),
        "of a memory with multipliers [67716810739261, 51510806800915, 30921347202721, 82619226485591], moduli [16000",
    ),
    "a map": (
        deepseek_with,
        lambda: deepseek_with(token_map=TOKEN_MAP),
        "of a memory with token_map none, but this one has token_map crc32 b66a2538",
    ),
    "other salts": (
        salted_with,
        lambda: salted_with(salts=(0, 1, 9, 3)),
        f"of a memory with salts [0, 1, 9, {2**31}], but this one has salts [0, 1, 9, 3]",
    ),
    "another base": (
        longcat_with,
        lambda: longcat_with(modulus_base=1002),
        "of a memory with modulus_base 1000, but this one has modulus_base 1002",
    ),
    "a map of bigrams": (
        lambda: XorNGrams(rows=100, token_map=TOKEN_MAP),
        lambda: XorNGrams(rows=100),
        "of a memory with token_map crc32 b66a2538, but this one has token_map none",
    ),
}


@pytest.mark.parametrize(("given", "own", "words"), STATES.values(), ids=STATES)
def test_a_state_of_another_scheme_is_refused_by_names_and_values(
    given: Callable[[], NGramScheme | None], own: Callable[[], NGramScheme | None], words: str, table_name: TableName
) -> None:
    state = memory(table_name(), given()).get_extra_state()
    with pytest.raises(ValueError, match=f"^NGramMemory: the state is {re.escape(words)}"):
        memory(table_name(), own()).set_extra_state(state)


NO_STATES: dict[str, Any] = {
    "a list": [3, 2, 40, 0],
    "None": None,
    "a number": torch.tensor(3),
    "a matrix": torch.zeros(2, 2, dtype=torch.int64),
    "nothing": torch.zeros(0, dtype=torch.int64),
    "no bytes": torch.tensor([300, -1, 3, 4, 5]),
    "no text": torch.tensor([255, 254, 253, 252, 251]),
    "no JSON": torch.tensor(list(b"{'n': 3}")),
    "deep JSON": torch.tensor(list(b"[" * 100_000)),
    "a JSON of a list": torch.tensor(list(b"[3, 2, 40, 0]")),
    "a JSON of a float": torch.tensor(list(b'{"n": 3.5}')),
    "a JSON of a truth value": torch.tensor(list(b'{"n": true}')),
    "a JSON of lists of texts": torch.tensor(list(b'{"n": ["3"]}')),
    "halves": torch.full((9,), 3.5),
}


@pytest.mark.parametrize("state", NO_STATES.values(), ids=NO_STATES)
@pytest.mark.parametrize("own", [lambda: None, qwen_with], ids=["no scheme", "a scheme"])
def test_what_is_no_state_is_refused(own: Callable[[], NGramScheme | None], state: Any, table_name: TableName) -> None:
    with pytest.raises(TypeError, match=r"^NGramMemory: expected the tensor that get_extra_state gives, got "):
        memory(table_name(), own()).set_extra_state(state)


def test_staged_rows_take_no_history(table_name: TableName) -> None:
    module = memory(table_name(), qwen_with())
    tokens, hidden = torch.randint(20, (2, 5)), torch.randn(2, 5, HIDDEN)
    for given, rows in StagingDataLoader([tokens], module, SlowCopies()):
        torch.testing.assert_close(module(hidden, rows), module(hidden, given))
        with pytest.raises(TypeError, match=r"^NGramMemory: staged rows take no history, they were read before$"):
            module(hidden, rows, given)
