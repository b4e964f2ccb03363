"""The graphs of programs: the same bits as torch's own module, what they have no words for, and what they refuse."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recstore_ops import DistEmbedding
from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.graph_writing import NoGraphError
from recstore_ops.serving.graph_writing import written as written_graph

pytestmark = pytest.mark.tier("test")


class Model(nn.Module):
    """A function as a model, with what it needs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parts.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Tensor) -> Any:
        """Returns what the function gives."""
        return self.function(self, *inputs)


def changed_in_place(_: Model, x: Tensor) -> Tensor:
    """Writes to tensors of its own, and to some whose memory was left as it was."""
    doubled, copied = x * 2, torch.empty(x.shape[0], 4)
    doubled[:, 0] = 0
    doubled += 1
    doubled[doubled > 1] = 5
    copied[:] = x
    return doubled.clamp_(0, 3).relu_() + copied + torch.empty_like(x).fill_(3) + x.new_empty((4,)).zero_()


MODELS = {
    "in place": Model(changed_in_place),
    "recurrent": Model(lambda own, x: own.layer(x.unsqueeze(0))[0], layer=nn.LSTM(4, 3, 2, dropout=0.5)),
    "encoder": Model(
        lambda own, x: own.layer(x.unsqueeze(0), src_key_padding_mask=(x[:, 0] > 0.5).unsqueeze(0)),
        layer=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, enable_nested_tensor=False
        ),
    ),
    "convolution": Model(
        lambda own, x: own.layer(x.unsqueeze(1)),
        layer=nn.Sequential(
            nn.Conv1d(1, 2, 3, padding="same"), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.MaxPool1d(2)
        ),
    ),
    "own statistics": Model(lambda own, x: own.norm(x), norm=nn.BatchNorm1d(4, track_running_stats=False)),
    "chosen": Model(lambda _, x: torch.where((x > 0) & (x < 1), x.topk(2).values.sum(1, keepdim=True), x.cumsum(1))),
    "sizes": Model(lambda _, x: x.reshape(x.shape[0] * 2, x.shape[1] // 2) * x.shape[0]),
    "numbers": Model(lambda _, x: torch.clamp(x * 0.1 + 1e-3, min=-float("inf"), max=2.5)),
    "types": Model(lambda _, x: x.to(torch.float64).sum(0, keepdim=True).to(torch.bfloat16)),
    "made": Model(lambda _, x: x + torch.arange(x.shape[1], dtype=torch.float32, device="cpu")),
    "parts": Model(lambda _, x: x.split(2, dim=1)),
    "text": Model(lambda _, x: torch.nn.functional.gelu(x, approximate="tanh")),
    "containers": Model(lambda _, x: {"a": [x, x + 1], "b": (x.mean(),)}),
    "state": Model(lambda own, x: own.dense(x) + own.shift, dense=nn.Linear(4, 4), shift=torch.rand(4)),
    "dropout": Model(lambda own, x: own.drop(own.dense(x)), dense=nn.Linear(4, 4), drop=nn.Dropout(0.5)),
    "norm": Model(lambda own, x: own.norm(x), norm=nn.BatchNorm1d(4)),
    "attention": Model(lambda own, x: own.layer(x, x, x)[0], layer=nn.MultiheadAttention(4, 2)),
    "loop": Model(lambda _, x: torch.stack([x[:, i] * i for i in range(3)], dim=1)),
    "constant": Model(lambda _, x: x @ torch.eye(4)),
}


def exported(model: nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), inputs, dynamic_shapes=(tuple({0: Dim.AUTO} for _ in inputs),))


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_gives_the_bits_of_the_module(name: str) -> None:
    program = exported(MODELS[name], torch.randn(6, 4))
    read = Graph(written_graph(program))
    held = {**program.constants, **program.state_dict}
    run, module = read.bind(held), program.module()
    with torch.no_grad():
        for batch in (6, 2, 31):
            x = torch.randn(batch, 4)
            expected = tree_leaves(module(x))
            for found, wanted in zip(run([x]), expected, strict=True):
                assert torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted


def test_calls_that_change_nothing_are_left_out() -> None:
    program = exported(Model(lambda own, x: own.drop(x.to(torch.float32)) * 2, drop=nn.Dropout()), torch.randn(6, 4))
    assert {"_assert_tensor_metadata", "to.dtype", "dropout"} <= {
        str(node.target).removeprefix("aten.").removesuffix(".default") for node in program.graph.nodes
    }
    assert [name for name, *_ in json.loads(written_graph(program))["calls"]] == ["aten::mul.Tensor"]


def test_what_has_no_graph_is_run_by_torch(tmp_path: Path, table_name: Callable[[], str]) -> None:
    class Chosen(nn.Module):
        """A model with control flow."""

        def __init__(self) -> None:
            super().__init__()
            self.table = DistEmbedding(None, 4, table_name())

        def forward(self, ids: Tensor) -> Tensor:
            """Returns rows, or their negatives."""
            rows = self.table(ids)
            return torch.cond(rows.sum() > 0, torch.neg, torch.clone, (rows,))

    model, ids = Chosen(), torch.arange(3)
    with pytest.raises(NoGraphError, match="control flow"):
        written_graph(torch.export.export(model, (ids,)))
    with pytest.warns(UserWarning, match="has no graph, because of control flow by cond: the bundle is code"):
        path = export(model, (ids,), tmp_path / "model")
    with pytest.raises(ValueError, match=r"model/program\.pt2 is code, .* trusted=True, or serve it with --trust-code"):
        load_bundle(path)
    bundle = load_bundle(path, trusted=True)
    assert list(bundle.manifest.files) == ["program.pt2"]
    assert bundle(ids).equal(model(ids))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda own, x: x + own.count.add_(1), "BUFFER_MUTATION"),
        (lambda _, x: x.mul_(2) + 1, "USER_INPUT_MUTATION"),
    ],
)
def test_what_changes_its_state_or_inputs_has_no_graph(function: Callable[..., Tensor], kind: str) -> None:
    with pytest.raises(NoGraphError, match=f"an output of kind {kind}"):
        written_graph(exported(Model(function, count=torch.zeros(4)), torch.rand(3, 4)))


def written(**changed: Any) -> str:
    """A graph that doubles its input, changed."""
    program = exported(Model(lambda _, x: x * 2), torch.rand(3, 2))
    return json.dumps({**json.loads(written_graph(program)), **changed})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["os.system", ["true"], {}], r"'os\.system' is not in the list of operators that a graph may call"),
        (["operator.attrgetter", ["x"], {}], r"'operator\.attrgetter' is not in the list of operators"),
        (["aten::no_such.default", [], {}], r"'aten::no_such\.default' is not in the list of operators"),
        (["aten::neg.default", [{"value": 7}], {}], "a call reads value 7, there are 1 before it"),
        (["aten::neg.default", [{"value": 0}], {"x=1, y": 2}], "has no further argument 'x=1, y'"),
        (["aten::neg.default", [{"dtype": "load"}], {}], r"\{'dtype': 'load'\} is no argument of a call"),
    ],
)
def test_a_graph_runs_nothing_else(call: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(written(calls=[call]))


def test_results_that_nobody_reads_any_more_are_let_go() -> None:
    alive: list[int] = []
    size = 1 << 20

    class Counted(TorchDispatchMode):
        """Counts the large tensors that live when an operator is called."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            alive.append(sum(1 for each in made if each() is not None))
            result = func(*args, **(kwargs or {}))
            made.append(weakref.ref(result))
            return result

    made: list[Any] = []
    program = exported(Model(lambda _, x: (((x + 1) + 1) + 1) + 1), torch.zeros(size, 1))
    run = Graph(written_graph(program)).bind({})
    with Counted():
        run([torch.zeros(size, 1)])
    assert max(alive) <= 2


def test_inputs_are_checked_by_the_manifest(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        """Two inputs of one batch."""

        def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
            """Returns their product."""
            return ids.sum(1) * scale

    bundle = load_bundle(export(Scaled(), (torch.ones(3, 2, dtype=torch.int64), torch.ones(3)), tmp_path / "model"))
    ids, scale = torch.ones(5, 2, dtype=torch.int64), torch.ones(5)
    assert bundle(ids, scale).equal(torch.full((5,), 2.0))
    with pytest.raises(ValueError, match=r"input scale: size 4 of dimension 0 must be equal to that of ids, 5"):
        bundle(ids, scale[:4])
    with pytest.raises(ValueError, match=r"input ids: expected int64 \[-1, 2\], got int64 \[5, 1\]"):
        bundle(ids[:, :1], scale)
    with pytest.raises(ValueError, match=r"input scale: expected float32 \[-1\], got float64 \[5\]"):
        bundle(ids, scale.double())
    with pytest.raises(ValueError, match="input scale: expected a tensor, got float"):
        bundle(ids, 1.0)
    with pytest.raises(ValueError, match="the bundle takes 2 tensors, ids, scale; got 1"):
        bundle.flat([ids])
    with pytest.raises(ValueError, match="the bundle takes the arguments that it was exported with"):
        bundle(ids)


@pytest.mark.parametrize(
    ("calls", "given", "message"),
    [
        (
            [["aten::item.default", [{"value": 0}], {}], ["operator.lt", [{"value": 1}, 2], {}]],
            torch.tensor(1j),
            "operator.lt: '<' not supported between instances of 'complex'",
        ),
        ([["aten::select.int", [{"value": 0}, 0, 9], {}]], torch.ones(2), "aten::select.int: .* index 9 out of range"),
        (
            [["aten::gru_cell.default", [1, {"value": 0}, {"value": 0}, {"value": 0}], {}]],
            torch.ones(2, 2),
            "aten::gru_cell.default: 'int' object has no attribute 'shape'",
        ),
    ],
)
def test_calls_that_do_not_take_what_others_gave_are_named(calls: list[Any], given: Tensor, message: str) -> None:
    run = Graph(written(calls=calls, outputs=[{"value": len(calls)}])).bind({})
    with pytest.raises(ValueError, match=message):
        run([given])
