"""Graphs that others wrote: what is no graph over a bundle's own tables is refused, and nothing of it runs."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_files import changed_graph
from misfit_kernels import MISFITS, misfit_calls
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recstore_ops import DistEmbedding, table_names
from recstore_ops.ops import operators
from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.structures import NoStructureError, read_structure, written_structure
from recstore_ops.sparse import JaggedTensor, KeyedJaggedTensor

pytestmark = pytest.mark.tier("test")

LEAF = {"type": None, "context": None, "children_spec": []}
IN, OUT = json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [LEAF]}]), json.dumps([1, LEAF])
X = {"value": 0}

TableName = Callable[[], str]


def graph(calls: Any, outputs: Any = ({"value": 1},), **fields: Any) -> str:
    """A graph of one input, whose state is the tensor "handle"."""
    given = {"state": [], "inputs": 1, "calls": calls, "outputs": outputs, "in_spec": IN, "out_spec": OUT}
    return json.dumps({**given, **fields})


def refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(text)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that must not be there in the end."""
    return tmp_path / "marker"


def test_names_that_lead_out_of_the_operators_are_refused(marker: Path) -> None:
    text = f"open({str(marker)!r}, 'w').close()"
    code = [
        ["load_library::__globals__.__getitem__", ["__builtins__"], {}],
        ["operator.getitem", [{"value": 1}, "exec"], {}],
        ["higher_order::wrap.__call__", [{"value": 2}, text], {}],
    ]
    refused(graph(code, [{"value": 3}]), "'load_library::__globals__.__getitem__' is not in the list of operators")
    refused(graph(code[2:]), r"a call reads value 2, there are 1 before it")
    refused(graph([["higher_order::wrap.__call__", [X, text], {}]]), "is not in the list of operators")
    refused(graph([["import_module::__call__.__call__", ["antigravity"], {}]]), "is not in the list of operators")
    in_file = ["aten::from_file.default", [str(marker), True, 1024], {"dtype": {"dtype": "uint8"}}]
    refused(graph([in_file]), r"'aten::from_file\.default' is not in the list of operators")
    for name in ("inductor::_reinterpret_tensor.default", "aten::resize_.default", "aten::fill_.Scalar", "prims::rand"):
        refused(graph([[name, [X], {}]]), f"'{name}' is not in the list")
    assert not marker.exists()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["aten::zeros.default", [[2]], {"layout": {"layout": "sparse_coo"}}], "is no argument of a call"),
        (["aten::zeros.default", [[2]], {"device": {"device": "cuda"}}], "is no argument of a call"),
        (["aten::zeros.default", [[2]], {"device": "cpu"}], r"device must be Optional\[Device\], got 'cpu'"),
        (["aten::zeros.default", [[2]], {"pin_memory": True}], "a constant by which the operator only computes"),
        (["aten::zeros.default", [[2]], {"dtype": 6}], r"dtype must be Optional\[ScalarType\], got 6"),
        (["aten::dropout.default", [X, {"float": "0.5"}, True], {}], "the argument train must be a constant"),
        (["aten::neg.default", [], {}], "the argument self is missing"),
        (["aten::neg.default", [X, X], {}], "takes 1 arguments by position, got 2"),
        (["aten::neg.default", [X], {"self": X}], "has no further argument 'self'"),
        (["aten::neg.default", ["text"], {}], "the argument self must be Tensor, got 'text'"),
        (["aten::neg.default", [None], {}], "the argument self must be Tensor, got None"),
        (["aten::neg.default", [[X]], {}], "the argument self must be Tensor, got a list of a tensor"),
        (["aten::neg.default", [[[X]]], {}], "is no argument of a call"),
        (["aten::neg.default", [{"value": True}], {}], "is no argument of a call"),
        (["aten::neg.default", [{"value": 0, "more": 0}], {}], "is no argument of a call"),
        (["aten::sum.dim_IntList", [X, [X]], {}], r"dim must be Optional\[List\[int\]\], got a list of a tensor"),
        (["aten::add.Tensor", [X, 1 << 63], {}], "an integer: expected"),
        (["aten::add.Tensor", [X, {"float": "1_0"}], {}], "is no argument of a call"),
        (["aten::add.Tensor", [X, 1.5], {}], "1.5 is no argument of a call"),
        (["operator.mul", ["text", 1 << 40], {}], "operator.mul takes 2 numbers, got 'text', "),
        (["operator.mul", [X, 2], {}], "operator.mul takes 2 numbers, got a tensor, 2"),
        (["operator.neg", [1, 2], {}], "operator.neg takes 1 numbers"),
        (["operator.neg", [1], {"x": 2}], "takes no arguments by name"),
        (["operator.getitem", [X, 0], {}], "takes what an operator of several results gave"),
        (["operator.getitem", [], {}], "takes what an operator of several results gave"),
        (["aten::neg.default", [X]], "a call has 2 parts"),
        ({"name": "aten::neg.default"}, "a call: expected a list"),
        ([7, [X], {}], "the name of a call: expected a string, got 7"),
        (["aten::neg.default", X, {}], "the arguments: expected a list"),
        (["aten::neg.default", [X], []], "the arguments by name: expected an object"),
    ],
)
def test_arguments_are_of_the_schema(call: Any, message: str) -> None:
    refused(graph([call]), message)


def test_statistics_are_not_written() -> None:
    """`batch_norm` in training writes to its running mean, of which its schema says nothing."""
    state = ["mean", "var"]
    for training, statistics, fits in (
        (False, [{"value": 0}, {"value": 1}], True),
        (True, [None, None], True),
        (True, [{"value": 0}, {"value": 1}], False),
        (True, [None, {"value": 1}], False),
        ({"value": 2}, [None, None], False),
    ):
        call = ["aten::batch_norm.default", [{"value": 2}, None, None, *statistics, training], {}]
        call[1] += [{"float": "0.1"}, {"float": "1e-05"}, False]
        text = graph([call], [{"value": 3}], state=state)
        if fits:
            assert Graph(text).state == state
        else:
            refused(text, "the argument training must be")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "the graph: expected an object"),
        (b"\xff\xfe", "codec can't decode"),
        (graph([], [X], more=1), "the graph has an unknown field 'more'"),
        ('{"state": [], "state": []}', "an object has a name twice"),
        (graph([], [X], inputs=-1), "inputs: expected 0 to"),
        (graph([], [X], inputs=True), "inputs: expected an integer, got True"),
        (graph([], [X], inputs=2), "it has 2 inputs, and a structure of 1"),
        (graph([], [X, X]), "it has 2 outputs, and a structure of 1"),
        (graph([], X), "outputs: expected a list"),
        (graph([], [[X]]), "an output is neither a tensor nor a number"),
        (graph([], [X], state=["a", "a"]), "state names one twice"),
        (graph([], [X], state=[["a"]]), r"state\[0\]: expected a string"),
        (graph({}, [X]), "calls: expected a list"),
        (graph([["aten::split.Tensor", [X, 1], {}]]), "an output is neither a tensor nor a number"),
        ('{"calls": ' + "[" * 100_000 + "]" * 100_000 + "}", "lie too deep in one another"),
        (graph([["aten::neg.default", [json.loads("[" * 300 + "]" * 300)], {}]]), "is no argument of a call"),
        ('{"inputs": NaN}', "NaN is no number of JSON"),
        ('{"inputs": ' + "1" * 5000 + "}", "Exceeds the limit"),
        (graph([], [X], in_spec="{}"), "in_spec: expected a list"),
        (graph([], [X], in_spec="[2, null]"), "in_spec: expected a structure of version 1"),
        (graph([], [X], in_spec=7), "in_spec: expected a string"),
        (graph([], [X], out_spec=json.dumps([1, {"type": None}])), "out_spec has no field 'children_spec'"),
    ],
)
def test_what_is_no_graph_is_refused(text: str | bytes, message: str) -> None:
    refused(text, message)


def spec(kind: str, context: str = "null", count: int = 0) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [LEAF] * count}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (spec("builtins.dict", json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}]), 1), "its keys"),
        (spec("collections.defaultdict", "{}"), "has containers of 'collections.defaultdict'"),
        (spec("os.system"), "has containers of 'os.system'"),
        (spec("builtins.tuple", "1"), "it has no context, got 1"),
        (spec("builtins.dict", '["a"]', 2), "expected 2 different keys"),
        (spec("builtins.dict", '["a", "a"]', 2), "expected 2 different keys"),
        (spec("collections.namedtuple", '["__class__"]', 1), "expected 1 names of fields"),
        (spec("collections.namedtuple", '["a)=1, x=(b"]', 1), "expected 1 names of fields"),
        (spec("collections.namedtuple", '["def"]', 1), "keyword"),
        (spec("collections.namedtuple", '"my.Class"', 1), "its fields: expected a list"),
        (spec("recstore_ops.KeyedJaggedTensor", '["a"]', 1), "expected 2 to 3 tensors, got 1"),
        (spec("recstore_ops.KeyedJaggedTensor", '{"keys": []}', 2), "has no field"),
        (spec("recstore_ops.KeyedTensor", '[["a"], [1, 2], 0]', 1), "it has 1 keys and 2 lengths"),
        (json.dumps([1, {"type": None, "context": None, "children_spec": [LEAF]}]), "a leaf has neither"),
    ],
)
def test_a_structure_names_no_class(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_structure(text, "in_spec")
    assert "antigravity" not in sys.modules


def test_a_structure_is_not_deep() -> None:
    deep = LEAF
    for _ in range(70):
        deep = {"type": "builtins.list", "context": "null", "children_spec": [deep]}
    with pytest.raises(ValueError, match="has containers more than 64 deep"):
        read_structure(json.dumps([1, deep]), "in_spec")


Point = namedtuple("Point", ["x", "y"])


def test_structures_are_read_as_they_were_written() -> None:
    one = torch.zeros(1)
    features = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([2, 1]))
    bag = JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1]))
    for value in ((one, [one, {"a": one, 2: one}]), OrderedDict(b=one, a=(one,)), features, bag, {}, one):
        structure = pytree.tree_flatten(value)[1]
        text = written_structure(structure)
        assert read_structure(text, "structure") == structure
        assert text == pytree.treespec_dumps(structure)
    read = read_structure(written_structure(pytree.tree_flatten(Point(one, [one]))[1]), "structure")
    made = pytree.tree_unflatten([1, 2], read)
    assert made == (1, [2])
    assert (made._fields, made.x, made.y) == (("x", "y"), 1, [2])
    for value in ({(1, 2): one}, {1.5: one}, torch.return_types.max((one, one))):  # pyright: ignore[reportCallIssue]
        with pytest.raises(NoStructureError, match="a container of "):
            written_structure(pytree.tree_flatten(value)[1])


class Rows(nn.Module):
    """The rows of a table."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.table = DistEmbedding(None, 4, name)
        operators.emb_write(self.table.table.handle, torch.arange(6), torch.randn(6, 4))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns rows [N, D] of ids [N]."""
        return self.table(ids)


def test_a_graph_meets_no_table_of_the_process(table_name: TableName, tmp_path: Path) -> None:
    path = export(Rows(table_name()), (torch.arange(3),), tmp_path / "model")
    user = Rows(name := table_name())
    before = user(torch.arange(6))
    state, handle = json.loads((path / "graph.json").read_text())["state"], {"value": 0}
    assert len(state) == 2, "the handle, and what stands for the table among parameters"
    handle = {"value": next(n for n, each in enumerate(state) if "lifted" in each)}
    ids, made = {"value": 2}, {"value": 3}
    key = torch.ops.recstore
    assert key.drop_table is not None
    for calls, message in (
        ([["recstore::drop_table.default", [name], {}]], "'recstore::drop_table.default' is not in the list"),
        ([["recstore::make_hashtable.default", [name, 4], {}]], "'recstore::make_hashtable.default' is not in the"),
        ([["recstore::emb_write.table", [handle, ids, ids], {}]], "'recstore::emb_write.table' is not in the list"),
        ([["recstore::emb_read.default", [ids, 4], {}]], "'recstore::emb_read.default' is not in the list"),
        ([["recstore::emb_read.table", [ids, ids, 4], {}]], "the argument table must be a table of the bundle, got a"),
        ([["recstore::emb_read.table", [5, ids, 4], {}]], "the argument table must be a table of the bundle, got 5"),
        (
            [["aten::neg.default", [ids], {}], ["recstore::emb_read.table", [made, ids, 4], {}]],
            "the argument table must be a table of the bundle, got a tensor",
        ),
        ([["aten::clone.default", [handle], {}]], "the argument self must be no table of the bundle"),
        ([["aten::stack.default", [[handle, ids]], {}]], "the argument tensors must be no table of the bundle"),
        (
            [["recstore::hashtable_lookup.default", [handle, ids, 4, True], {}]],
            "the argument insert must be a constant",
        ),
        ([["recstore::emb_bag.tables", [[], ids, ids, [4], 0], {}]], "emb_bag.tables of no tables"),
    ):
        changed_graph(path, calls=calls, outputs=[{"value": 2 + len(calls)}])
        if message == "emb_bag.tables of no tables":
            with pytest.raises(ValueError, match=r"graph\.json: an output is neither a tensor nor a number"):
                load_bundle(path)
            continue
        with pytest.raises(ValueError, match=rf"graph\.json: .*{message}"):
            load_bundle(path)
    changed_graph(path, calls=[], outputs=[handle])
    with pytest.raises(ValueError, match="an output is neither a tensor nor a number"):
        load_bundle(path)
    changed_graph(path, calls=[["recstore::emb_read.table", [handle, ids, 4], {}]], outputs=[made])
    assert load_bundle(path)(torch.arange(3)).shape == (3, 4)
    assert name in table_names()
    assert user(torch.arange(6)).equal(before)


@pytest.mark.parametrize(("name", "tensors", "arguments"), MISFITS)
def test_kernels_are_given_what_fits(name: str, tensors: list[Any], arguments: list[Any]) -> None:
    calls, flat = misfit_calls(name, tensors, arguments)
    out, arity = {"value": len(flat) + len(calls) - 1}, spec("builtins.tuple", count=len(flat))
    run = Graph(graph(calls, [out], inputs=len(flat), in_spec=arity)).bind({})
    with pytest.raises(ValueError, match=rf"aten::{name}: .* do not fit each other"):
        run(flat)


@pytest.mark.parametrize("offsets", [[0, 2, 600], [0, -2, 3], [3, 0, 5], [], [[0, 6]]])
def test_segments_lie_within_their_rows(offsets: list[Any]) -> None:
    call = ["aten::segment_reduce.default", [X, "sum"], {"offsets": {"value": 1}}]
    run = Graph(graph([call], [{"value": 2}], inputs=2, in_spec=spec("builtins.tuple", count=2))).bind({})
    assert run([torch.ones(6), torch.tensor([0, 2, 6])])[0].tolist() == [2, 4]
    with pytest.raises(ValueError, match=r"data and offsets of shape .* do not fit each other"):
        run([torch.ones(6), torch.tensor(offsets, dtype=torch.int64)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_quotient_beyond_its_type_is_refused(dtype: torch.dtype) -> None:
    for name, other in (("div.Tensor_mode", {"value": 1}), ("divide.Scalar_mode", -1)):
        call = [f"aten::{name}", [X, other], {"rounding_mode": "trunc"}]
        text = graph([call], [{"value": 2}], inputs=2, in_spec=spec("builtins.tuple", count=2))
        run, divisor = Graph(text).bind({}), torch.tensor([-1], dtype=dtype)
        assert run([torch.tensor([-7], dtype=dtype), divisor])[0].tolist() == [7]
        with pytest.raises(ValueError, match=r"dividends and divisors of shape .* do not fit each other"):
            run([torch.tensor([torch.iinfo(dtype).min], dtype=dtype), divisor])


@pytest.mark.parametrize("size", [1 << 62, {"value": 1}])
def test_windows_are_small(size: Any) -> None:
    calls = [["operator.mul", [1 << 61, 2], {}], ["aten::max_pool1d.default", [X, [2], [1], [size]], {}]]
    run = Graph(graph(calls, [{"value": 2}])).bind({})
    with pytest.raises(
        ValueError, match=r"aten::max_pool1d\.default: padding has more than 32 bits, got \[46116860184273"
    ):
        run([torch.rand(1, 1, 4)])


def test_numbers_that_are_computed_are_checked_when_they_are_used() -> None:
    calls = [["aten::item.default", [X], {}], ["aten::narrow.default", [X, 0, 0, {"value": 1}], {}]]
    run = Graph(graph(calls, [{"value": 2}])).bind({})
    assert run([torch.tensor([1])])[0].equal(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'length'"):
        run([torch.tensor([0.5])])
    calls = [["aten::sym_size.int", [X, 0], {}], ["operator.mul", [{"value": 1}, 1 << 62], {}]]
    with pytest.raises(ValueError, match="mul of 4, 4611686018427387904 is beyond 64 bits"):
        Graph(graph(calls, [{"value": 2}])).bind({})([torch.zeros(4)])
