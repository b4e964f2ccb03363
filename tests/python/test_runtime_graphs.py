"""Any graph without Python: outputs of `load_bundle` in Rust and C++, nothing aliases, and no graph ends a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_programs import Answer, Program, Table, answers, stored
from misfit_kernels import MISFITS, misfit_calls
from runtime_programs import ONLY_TORCH, Runtime
from torch import Tensor

from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
from recstore_ops.serving import export

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(3000), ONLY_TORCH]

HERE = Path(__file__).parent
LANGUAGES = ("rust", "cpp")
PROGRAMS, WATCHED = 2000, 200

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
IDS = torch.tensor([4, 1, 7])


@pytest.fixture
def table_of(table_name: Callable[[], str], tmp_path: Path) -> Path:
    """A bundle with one table of four columns."""
    module = DistEmbedding(None, 4, table_name())
    operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    return export(module, (torch.arange(3),), tmp_path / "table_of")


@pytest.fixture(scope="module")
def random_programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random programs, made in a process of their own: kernels of torch could end it."""
    folder = tmp_path_factory.mktemp("random")
    command = [sys.executable, str(HERE / "random_graphs.py"), str(folder), "0", str(PROGRAMS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(set(ended.stdout.split())) > 600, "most operators of the list are called"
    return [folder / str(number) for number in range(PROGRAMS)]


@pytest.fixture(scope="module")
def wanted(random_programs: list[Path]) -> list[Answer]:
    """What `load_bundle` gives."""
    found = answers([sys.executable, str(HERE / "graph_programs.py")], "python", random_programs)
    assert sum(not answer.refused for answer in found) > PROGRAMS / 2, "most programs give something"
    return found


def others(programs: Sequence[Path], wanted: Sequence[Answer], found: Sequence[Answer]) -> list[Any]:
    """The programs that were refused in one language alone, or gave something else."""
    return [
        (program, python.refused, answer.refused)
        for program, python, answer in zip(programs, wanted, found, strict=True)
        if bool(python.refused) != bool(answer.refused) or python.outputs != answer.outputs
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_random_programs_give_what_load_bundle_gives(
    runtime: Runtime, random_programs: list[Path], wanted: list[Answer], language: str
) -> None:
    assert others(random_programs, wanted, runtime.answers(language, random_programs)) == []


def test_random_programs_under_address_sanitizer(
    runtime: Runtime, random_programs: list[Path], wanted: list[Answer]
) -> None:
    assert others(random_programs, wanted, runtime.sanitized_answers(random_programs)) == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_random_programs_under_valgrind(runtime: Runtime, random_programs: list[Path], language: str) -> None:
    # Kernels read whole vectors, of which they use what is initialised.
    under = ["valgrind", "--quiet", "--error-exitcode=9", "--undef-value-errors=no"]
    some = random_programs[:: PROGRAMS // WATCHED]
    assert len(runtime.answers(language, some, under=under)) == WATCHED


def ask(
    runtime: Runtime, program: Program, folder: Path, allowed: Sequence[str] = (), languages: Sequence[str] = LANGUAGES
) -> Answer:
    """The answer of both languages, which is the same."""
    written = program.write(folder / "program")
    found = {runtime.answers(language, [written], operators=allowed)[0] for language in languages}
    assert len({(answer.refused.replace("\n", " "), answer.outputs) for answer in found}) == 1, found
    return found.pop()


def given(program: Program) -> tuple[bytes, ...]:
    return tuple(map(stored, program.gives))


# Honest programs.

CONJUGATED = [
    ["aten::view_as_complex.default", [{"value": 0}], {}],
    ["aten::conj.default", [{"value": 1}], {}],
    ["aten::imag.default", [{"value": 2}], {}],
    ["aten::real.default", [{"value": 2}], {}],
]
ALIASES = [
    ["aten::view.default", [{"value": 1}, [-1]], {}],
    ["aten::t.default", [{"value": 0}], {}],
    ["aten::relu.default", [{"value": 1}], {}],
    ["aten::select.int", [{"value": 4}, 0, 1], {}],
]
HONEST = {
    "conjugate": Program(CONJUGATED, [3, 4], [X], [-X[:, 1], X[:, 0]]),
    "aliases": Program(
        ALIASES,
        [0, 1, 0, 1, 2, 3, 4, 5, 4],
        [X],
        [X + 1, X, X + 1, X, X.flatten(), (X + 1).T, X.relu(), X.relu()[1], X.relu()],
        {"s": X + 1},
    ),
    "empty": Program(
        [["aten::zeros.default", [[0, 3]], {}], ["aten::zeros.default", [[]], {}]],
        [0, 1, 2],
        [torch.zeros(0)],
        [torch.zeros(0), torch.zeros(0, 3), torch.zeros(())],
    ),
    "nothing": Program([], [], [], []),
    "statistics of the input": Program(
        [
            [
                "aten::instance_norm.default",
                [{"value": 0}, *[None] * 4, True, {"float": "0.1"}, {"float": "1e-05"}, False],
                {},
            ]
        ],
        [1],
        [torch.ones(1, 2, 3)],
        [torch.zeros(1, 2, 3)],
    ),
    "truncated": Program(
        [["aten::div.Tensor_mode", [{"value": 0}, {"value": 1}], {"rounding_mode": "trunc"}]],
        [2],
        [torch.tensor([-(2**63), 7]), torch.tensor([2, -1])],
        [torch.tensor([-(2**62), -7])],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_gives(runtime: Runtime, tmp_path: Path, name: str) -> None:
    answer = ask(runtime, HONEST[name], tmp_path)
    assert (answer.refused, answer.outputs) == ("", given(HONEST[name]))


# Programs that are refused.


def one(name: str, *args: Any, **kwargs: Any) -> Program:
    """A call over the state `s`, the input x and its result as the output."""
    return Program([[name, list(args), kwargs]], [2], [X], [X], {"s": X})


S, INPUT = {"value": 0}, {"value": 1}
UNLISTED = {
    "aten::from_file.default": one("aten::from_file.default", "/etc/passwd", False, 16, dtype={"dtype": "uint8"}),
    "inductor::_reinterpret_tensor.default": one("inductor::_reinterpret_tensor.default", INPUT, [999], [1], 0),
    "aten::to_sparse.default": one("aten::to_sparse.default", INPUT),
    "aten::to_mkldnn.default": one("aten::to_mkldnn.default", INPUT),
    "aten::_efficientzerotensor.default": one("aten::_efficientzerotensor.default", [2, 2]),
    "aten::fill_.Scalar": one("aten::fill_.Scalar", INPUT, 7),
    "aten::add_.Tensor": one("aten::add_.Tensor", S, INPUT),
    "aten::relu.out": one("aten::relu.out", INPUT, out=S),
    "aten::set_.source_Tensor": one("aten::set_.source_Tensor", S, INPUT),
    "aten::as_strided_.default": one("aten::as_strided_.default", INPUT, [9], [1]),
    "recstore::drop_table.default": one("recstore::drop_table.default", "user"),
    "recstore::emb_write.table": one("recstore::emb_write.table", S, INPUT, INPUT),
    "operator.pow": one("operator.pow", 2, 3),
    "higher_order::wrap.__call__": one("higher_order::wrap.__call__", 2),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_what_is_not_listed_is_refused_by_name(runtime: Runtime, tmp_path: Path, name: str) -> None:
    answer = ask(runtime, UNLISTED[name], tmp_path)
    told = "graphs may not call it, unless who opens the bundle allows its name"
    assert answer.refused == f"{tmp_path}/program/bundle/graph.json: {name}: {told}"


ALLOWED = {
    "inductor::_reinterpret_tensor.default": "it gives a tensor that leaves its storage",
    "aten::to_sparse.default": "it gives a tensor that is not a dense one of the CPU",
    "aten::to_mkldnn.default": "it gives a tensor that is not a dense one of the CPU",
    "aten::_efficientzerotensor.default": "it gives a tensor that is not a dense one of the CPU",
    "aten::fill_.Scalar": "it writes to its arguments",
    "aten::add_.Tensor": "it writes to its arguments",
    "aten::relu.out": "it writes to its arguments",
    "aten::set_.source_Tensor": "it writes to its arguments",
    "aten::as_strided_.default": "it writes to its arguments",
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_the_caller_allows_neither_writes_nor_leaves_its_memory(
    runtime: Runtime, tmp_path: Path, name: str
) -> None:
    answer = ask(runtime, UNLISTED[name], tmp_path, [name])
    assert f"{name.removesuffix('.default')}: {ALLOWED[name]}" in answer.refused


def test_a_caller_allows_exact_names(runtime: Runtime, tmp_path: Path) -> None:
    operator = "aten::new_empty_strided"
    calls = [[f"{operator}.default", [INPUT, [2, 2], [2, 1]], {}]]
    program = Program(calls, [1], [X], [X], {"s": X})
    assert "graphs may not call it" in ask(runtime, program, tmp_path / "no").refused
    for place, allowed in enumerate((f"{operator}.default", operator)):
        assert ask(runtime, program, tmp_path / str(place), [allowed]).outputs == given(program)
    assert "names no operator" in ask(runtime, program, tmp_path / "other", ["new_empty_strided"]).refused


STATISTICS = [torch.zeros(2), torch.ones(2)]


def normalized(training: Any, *statistics: Any) -> Program:
    args = [{"value": 2}, None, None, *statistics, training, {"float": "0.1"}, {"float": "1e-05"}, False]
    state = dict(zip("mv", STATISTICS, strict=True))
    return Program([["aten::batch_norm.default", args, {}]], [3], [X], [X], state)


MISUSED = {
    "statistics": (normalized(True, {"value": 0}, {"value": 1}), "argument training must be the constant false"),
    "one statistic": (normalized(True, {"value": 0}, None), "argument training must be the constant false"),
    "computed": (
        Program(
            [
                ["operator.eq", [1, 1], {}],
                ["aten::dropout.default", [{"value": 0}, {"float": "0.5"}, {"value": 1}], {}],
            ],
            [2],
            [X],
            [X],
        ),
        "argument train must be the constant false",
    ),
    "dropout": (one("aten::dropout.default", INPUT, {"float": "0.5"}, True), "argument train must be"),
    "attention": (
        one("aten::scaled_dot_product_attention.default", INPUT, INPUT, INPUT, None, {"float": "0.5"}),
        "argument dropout_p must be the constant 0",
    ),
    "pinned": (one("aten::zeros.default", [2], pin_memory=True), "argument pin_memory must be"),
    "dtype as a number": (one("aten::zeros.default", [2], dtype=99), "argument dtype: expected"),
    "unknown dtype": (one("aten::zeros.default", [2], dtype={"dtype": "quint8"}), "this runtime knows no type quint8"),
    "device": (one("aten::zeros.default", [2], device={"device": "cuda"}), "this runtime knows no device cuda"),
    "layout": (one("aten::zeros.default", [2], layout={"layout": "sparse_coo"}), "this runtime knows no layout"),
    "a dtype for a number": (one("aten::add.Scalar", INPUT, {"dtype": "int64"}), "argument other: expected"),
    "text for a number": (one("aten::add.Scalar", INPUT, "1"), "argument other: expected"),
    "a tensor for a number": (one("aten::select.int", INPUT, 0, INPUT), "argument index: expected"),
    "a float for a size": (one("aten::select.int", INPUT, 0, {"float": "1.0"}), "argument index: expected"),
    "a list for a tensor": (one("aten::relu.default", [1]), "argument self: expected Tensor, got a list"),
    "nothing for a tensor": (one("aten::relu.default", None), "argument self: expected Tensor, got None"),
    "nothing in a list": (one("aten::cat.default", [INPUT, None]), "argument tensors: expected Tensor, got None"),
    "no argument": (one("aten::relu.default"), "the graph gives no argument self"),
    "more arguments": (one("aten::relu.default", INPUT, 1), "it takes 1 arguments by place, the graph gives 2"),
    "by place": (one("aten::add.Tensor", INPUT, INPUT, 2), "it takes 2 arguments by place, the graph gives 3"),
    "another name": (one("aten::relu.default", INPUT, other=1), "it has no argument other by name"),
    "twice": (one("aten::relu.default", INPUT, self=INPUT), "it has no argument self by name"),
    "of a number": (one("aten::sym_size.int", INPUT, 0), "an output is no tensor"),
    "a complex output": (one("aten::view_as_complex.default", INPUT), "gives no tensors of type ComplexFloat"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misused_operators_are_refused_with_the_argument(runtime: Runtime, tmp_path: Path, name: str) -> None:
    program, reason = MISUSED[name]
    assert reason in ask(runtime, program, tmp_path).refused


EMPTY, WHOLE = torch.zeros(0, 3), torch.tensor([[1, 2]])
TRUNC = {"rounding_mode": "trunc"}
ENDING: dict[str, tuple[str, list[Any], dict[str, Any], list[Tensor], str]] = {
    "trap": (
        *("aten::div.Tensor_mode", [{"value": 0}, {"value": 1}], TRUNC),
        *([torch.tensor([-(2**63), 7]), torch.tensor([-1])], "the smallest integer has no quotient by -1"),
    ),
    "trap of a number": (
        *("aten::divide.Scalar_mode", [{"value": 0}, -1], TRUNC),
        *([torch.tensor([-(2**31)], dtype=torch.int32)], "the smallest integer has no quotient by -1"),
    ),
    "trap of a cast": (
        *("aten::div.Tensor_mode", [{"value": 0}, {"value": 1}], TRUNC),
        *(
            [torch.tensor(-(2**31)), torch.tensor([-1], dtype=torch.int32)],
            "the smallest integer has no quotient by -1",
        ),
    ),
    "empty weight": (
        *("aten::_weight_norm.default", [{"value": 0}, {"value": 0}], {}),
        *([EMPTY], "a weight must have elements"),
    ),
    "lengths of another": (
        *("aten::_weight_norm.default", [{"value": 0}, {"value": 1}], {}),
        *([torch.ones(1), EMPTY], "a weight must have elements"),
    ),
    "empty norm": ("aten::norm_except_dim.default", [{"value": 0}], {}, [EMPTY], "a weight must have elements"),
    "flat bags": (
        *("aten::embedding_bag.default", [{"value": 0}, {"value": 1}, {"value": 1}], {"sparse": True}),
        *([X, WHOLE], "bags take a matrix, and indices and offsets of one dimension"),
    ),
    "no row": (
        *("aten::embedding_bag.default", [{"value": 0}, {"value": 1}, {"value": 2}], {}),
        *([X, torch.tensor([0, 2]), torch.tensor([0])], "an index of a bag is none of a row"),
    ),
    "no offset": (
        *("aten::embedding_bag.default", [{"value": 0}, {"value": 1}, {"value": 2}], {}),
        *([X, torch.tensor([0, 1]), torch.tensor([0, 9, 1])], "offsets of bags must ascend"),
    ),
    "no parameters": (
        "aten::gru.input",
        [{"value": 0}, {"value": 0}, [{"value": 1}, {"value": 1}], False, 9, {"float": "0.0"}, False, False, False],
        {},
        [torch.zeros(1, 2, 2), X],
        "there must be the parameters of each layer and direction",
    ),
    "a large window": (
        *("aten::max_pool1d.default", [{"value": 0}, [2**53], [2**62], [1], [2**53]], {}),
        *([torch.zeros(4, 3)], "a size of a window has more than 32 bits"),
    ),
    "a large pool": (
        *("aten::_adaptive_avg_pool3d.default", [{"value": 0}, [2**53, 4, 0]], {}),
        *([torch.zeros(1, 2, 4, 4)], "a size of a window has more than 32 bits"),
    ),
}


@pytest.mark.parametrize("name", ENDING)
def test_no_kernel_ends_the_process(runtime: Runtime, tmp_path: Path, name: str) -> None:
    operator, args, kwargs, inputs, reason = ENDING[name]
    program = Program([[operator, args, kwargs]], [len(inputs)], inputs, [X])
    refused = ask(runtime, program, tmp_path).refused
    assert refused.startswith(operator.removesuffix(".default") + ": ")
    assert reason in refused


@pytest.mark.parametrize(("name", "tensors", "arguments"), MISFITS)
def test_kernels_are_given_what_fits(
    runtime: Runtime, tmp_path: Path, name: str, tensors: list[Any], arguments: list[Any]
) -> None:
    calls, inputs = misfit_calls(name, tensors, arguments)
    refused = ask(runtime, Program(calls, [len(inputs) + len(calls) - 1], inputs, [X]), tmp_path).refused
    assert refused.startswith(f"aten::{name.removesuffix('.default').split('.')[0]}")


@pytest.mark.parametrize("offsets", [[0, 2, 600], [0, -2, 3], [3, 0, 5], [], [[0, 6]]])
def test_segments_lie_within_their_rows(runtime: Runtime, tmp_path: Path, offsets: list[Any]) -> None:
    call = ["aten::segment_reduce.default", [{"value": 0}, "sum"], {"offsets": {"value": 1}}]
    inputs = [torch.ones(6), torch.tensor(offsets, dtype=torch.int64)]
    refused = ask(runtime, Program([call], [2], inputs, [X]), tmp_path).refused
    assert "offsets of segments must ascend within the rows" in refused


def over_a_table(table_of: Path, calls: list[Any], outputs: Sequence[int] = (3,), **state: Tensor) -> Program:
    """A program over the handle of a table, 0, a state or input with the words of one, 1, and ids, 2."""
    words = torch.zeros(2, dtype=torch.int64)
    inputs = [IDS] if state else [words, IDS]
    program = Program(calls, list(outputs), inputs, [X] * len(outputs), state, Table.of(table_of), ["handle"])
    return program


def read(table: Any) -> list[Any]:
    return ["recstore::emb_read.table", [table, {"value": 2}, 4], {}]


def test_reads_take_the_tables_of_the_bundle_alone(runtime: Runtime, table_of: Path, tmp_path: Path) -> None:
    program = over_a_table(table_of, [read({"value": 0})])
    assert ask(runtime, program, tmp_path / "own").refused == ""
    computed = [["aten::relu.default", [{"value": 1}], {}], read({"value": 3})]
    for name, calls in {"input": [read({"value": 1})], "number": [read(5)], "computed": computed}.items():
        refused = ask(runtime, over_a_table(table_of, calls), tmp_path / name).refused
        assert refused.endswith("recstore::emb_read.table: argument table must be a table of the bundle"), name
    other = [["aten::relu.default", [{"value": 0}], {}]]
    refused = ask(runtime, over_a_table(table_of, other), tmp_path / "other").refused
    assert refused.endswith("aten::relu: argument self must not be a table of the bundle")
    refused = ask(runtime, over_a_table(table_of, [], [0]), tmp_path / "given").refused
    assert refused.endswith("an output is the handle of a table")
    inserts = ["recstore::hashtable_lookup.default", [{"value": 0}, {"value": 2}, 4, True], {}]
    refused = ask(runtime, over_a_table(table_of, [inserts]), tmp_path / "inserts").refused
    assert refused.endswith("argument insert must be the constant false")
