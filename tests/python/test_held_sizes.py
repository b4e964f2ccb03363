"""The sizes that bundles answer: those of the exported program, and one row and none where nothing forbids it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.checked_json import checked_json

pytestmark = pytest.mark.tier("test")

VARYING = ({0: Dim.AUTO, 1: Dim.AUTO},)
SPECIMEN = Path(__file__).with_name("fixtures") / "bundle_v2"


class Model(nn.Module):
    """A function of tensors as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        """Returns what the function gives."""
        return self.function(x)


class OfTwo(nn.Module):
    """A function of two tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Returns what the function gives."""
        return self.function(x, y)


class UserAndItem(NamedTuple):
    """Two tensors."""

    user: Tensor
    item: Tensor


LAST = Model(lambda x: x[:, -8:].sum(1) if x.shape[1] > 8 else x.sum(1))
SHOWN = {
    "a bound by a branch": (LAST, (4, 6), (4, 12), "input x: size 12 of dimension 1 must be 8 or less"),
    "a bound from below": (LAST, (4, 12), (4, 6), "input x: size 6 of dimension 1 must be 9 or more"),
    "a whole part": (Model(lambda x: x * int(x.shape[0] / 2)), (4, 6), (7, 6), r"trunc\(x.shape\[0\] / 2\) == 2"),
    "a remainder": (
        Model(lambda x: torch.cat([x, x[:, :1]], 1) if x.shape[1] % 2 else x),
        (4, 6),
        (4, 7),
        r"\(x.shape\[1\] % 2\) == 0",
    ),
    "two sizes": (
        Model(lambda x: x * 2 if x.shape[0] > x.shape[1] else x),
        (8, 6),
        (4, 6),
        r"x.shape\[0\] > x.shape\[1\]",
    ),
    "a write": (Model(lambda x: x.clone().mul_(2) if x.shape[1] > x.shape[0] else x), (4, 12), (4, 3), "must be such"),
    "a branch by the size of a slice": (
        Model(lambda x: x[:, :10].sum(1) if x[:, :10].shape[1] > 7 else x.sum(1)),
        (4, 12),
        (4, 6),
        "10 or more",
    ),
    "a slice to a slice": (
        Model(lambda x: x[:, :10][:, :5] * x[:, :10][:, :5].shape[1]),
        (4, 12),
        (4, 4),
        "10 or more",
    ),
    "the sizes of a slice": (Model(lambda x: x[:, -8:].sum(1) / x[:, -8:].shape[1]), (4, 12), (4, 5), "8 or more"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_sizes_that_the_program_excludes_are_refused(name: str, tmp_path: Path) -> None:
    model, example, other, told = SHOWN[name]
    bundle = load_bundle(export(model, (torch.randn(example),), tmp_path / "model", dynamic_shapes=VARYING))
    x = torch.randn(example)
    assert bundle(x).equal(model(x))
    with pytest.raises(ValueError, match=told):
        bundle(torch.randn(other))


HONEST = {
    "differences": (Model(lambda x: x[1:] - x[:-1]), (7, 6)),
    "the first items": (Model(lambda x: x[:, : min(x.shape[1], 8)].sum(1)), (4, 6)),
    "groups": (Model(lambda x: x[:, : x.shape[1] // 4 * 4].reshape(x.shape[0], -1, 4).sum(2)), (4, 8)),
    "a product": (Model(lambda x: x @ torch.ones(6, 2)), (4, 6)),
    "at most ten items": (Model(lambda x: x[:, :10].sum(1)), (4, 6)),
    "all but few items": (Model(lambda x: x[:, -10:].mean(1)), (4, 12)),
    "two slices": (Model(lambda x: torch.cat([x[:, :10], x[:, 10:]], 1)), (4, 12)),
    "the first rows": (Model(lambda x: x[:3] + 1), (4, 6)),
    "a slice that is written": (Model(lambda x: torch.relu(x)[:, :10].add_(1).cumsum(1)), (4, 6)),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 9])
def test_what_is_right_for_all_sizes_is_answered(name: str, rows: int, tmp_path: Path) -> None:
    model, example = HONEST[name]
    if rows == 0 and name in ("differences", "groups"):
        pytest.skip("the model itself takes no less than one row")
    shapes = None if name in ("differences", "a product") else VARYING
    bundle = load_bundle(export(model, (torch.randn(example),), tmp_path / "model", dynamic_shapes=shapes))
    for columns in (example[1],) if shapes is None else (8, 9, 12):
        x = torch.randn(rows, columns)
        assert bundle(x).equal(model(x))


def test_bounds_that_the_author_gave_are_held(tmp_path: Path) -> None:
    sizes = {0: Dim("batch", min=2, max=64), 1: Dim.AUTO(min=3, max=8)}
    bundle = load_bundle(
        export(Model(lambda x: x.sum(1)), (torch.ones(4, 6),), tmp_path / "model", dynamic_shapes=(sizes,))
    )
    assert bundle.manifest.ranges == {"n0": (0, 64), "n1": (3, 8)}
    assert bundle(torch.ones(1, 3)).tolist() == [3.0]
    with pytest.raises(ValueError, match="input x: size 65 of dimension 0 must be 64 or less, for which the program"):
        bundle(torch.ones(65, 6))
    with pytest.raises(ValueError, match="input x: size 2 of dimension 1 must be 3 to 8, for which the program"):
        bundle(torch.ones(4, 2))


def test_sizes_made_of_others_are_held(tmp_path: Path) -> None:
    size = Dim("size")
    model = OfTwo(lambda x, y: x.sum(1) + y.sum(1))
    shapes = ({1: 2 * size + 1}, {1: size})
    bundle = load_bundle(export(model, (torch.ones(4, 7), torch.ones(4, 3)), tmp_path / "model", dynamic_shapes=shapes))
    assert bundle(torch.ones(4, 9), torch.ones(4, 4)).tolist() == [13.0] * 4
    with pytest.raises(ValueError, match=r"x.shape\[1\] == \(1 \+ 2\*y.shape\[1\]\)"):
        bundle(torch.ones(4, 8), torch.ones(4, 3))


def test_what_a_bundle_cannot_check_is_not_exported(tmp_path: Path) -> None:
    model = Model(lambda x: x * round(x.shape[0] * 0.5) if round(x.shape[0] * 0.5) == 2 else x)
    with pytest.raises(ValueError, match=r"right only where .*x.shape\[0\].* holds of the sizes of its inputs"):
        export(model, (torch.ones(4, 6),), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_loaded_program_checks_relations_too(tmp_path: Path) -> None:
    path = export(SHOWN["two sizes"][0], (torch.ones(8, 6),), tmp_path / "model", dynamic_shapes=VARYING)
    program = load_bundle(path, trusted=True).program().module()
    assert program(torch.ones(9, 6)).equal(torch.full((9, 6), 2.0))
    with pytest.raises(RuntimeError, match="sizes of the inputs must be such that"):
        program(torch.ones(4, 6))


def test_a_bundle_of_format_2_is_read() -> None:
    bundle = load_bundle(SPECIMEN)
    assert bundle.manifest.ranges == {}
    for rows in (0, 1, 5):
        scaled, total = bundle(torch.ones(rows, 3))
        assert scaled.equal(torch.tensor([[1.0, 2.0, 4.0]]).expand(rows, 3))
        assert total.equal(torch.full((rows,), 3.0 * rows))


@pytest.mark.parametrize("ranges", [{"n9": [0, 1]}, {"n0": [0]}, {"n0": [-1, 2]}, {"n0": [3, 2]}, {"n0": 1}, [], None])
def test_ranges_that_are_none_are_refused(ranges: Any, tmp_path: Path) -> None:
    path = export(Model(lambda x: x + 1), (torch.ones(4, 6),), tmp_path / "model")
    fields = json.loads((path / "manifest.json").read_text())
    kept = {name: value for name, value in fields.items() if name not in ("format", "version", "crc32")}
    (path / "manifest.json").write_text(checked_json({**kept, "ranges": ranges}, "recstore bundle", 3))
    with pytest.raises(OSError, match=r"manifest\.json is damaged: .*ranges"):
        load_bundle(path)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_projected_states(has_biases: bool, both: bool, tmp_path: Path) -> None:
    layer = nn.LSTM(6, 12, 2, proj_size=4, batch_first=True, bias=has_biases, bidirectional=both)
    x = torch.randn(3, 5, 6)
    bundle = load_bundle(export(layer, (x,), tmp_path / "model"))
    with torch.no_grad():
        torch.testing.assert_close(bundle(x[:1])[0], layer(x[:1])[0])


def test_named_tuples_go_in_and_come_out(tmp_path: Path) -> None:
    class Both(nn.Module):
        """A model of named tuples."""

        def forward(self, sides: UserAndItem) -> UserAndItem:
            """Returns other ones."""
            return UserAndItem(sides.user + 1, sides.item * 2)

    x = torch.ones(4, 2)
    bundle = load_bundle(export(Both(), (UserAndItem(x, x),), tmp_path / "model"))
    given = bundle(UserAndItem(x[:1], x[:1]))
    assert given._fields == UserAndItem._fields
    assert given.item.equal(x[:1] * 2)


def test_collected_arguments(tmp_path: Path) -> None:
    class Sum(nn.Module):
        """A model of any number of tensors."""

        def forward(self, *fields: Tensor) -> Tensor:
            """Returns their sum."""
            return torch.stack(fields).sum(0)

    class Named(nn.Module):
        """A model of tensors of any names."""

        def forward(self, scale: float = 2.0, **fields: Tensor) -> Tensor:
            """Returns their sum, scaled."""
            return torch.stack(list(fields.values())).sum(0) * scale

    x, model = torch.ones(4, 2), Named()
    assert load_bundle(export(Sum(), (x, x), tmp_path / "sum"))(x[:3], x[:3]).equal(x[:3] * 2)
    assert load_bundle(export(model, {"b": x, "a": x}, tmp_path / "named"))(a=x[:3], b=x[:3]).equal(x[:3] * 4)
    assert model(c=x).equal(x * 2)


def test_a_call_of_another_form_says_the_names(tmp_path: Path) -> None:
    model = OfTwo(lambda x, y: x + y)
    x = torch.ones(4, 2)
    bundle = load_bundle(export(model, {"x": x, "y": x}, tmp_path / "model"))
    with pytest.raises(ValueError, match=r"bundle\(x=..., y=...\); got bundle\(..., ...\)"):
        bundle(x, x)
