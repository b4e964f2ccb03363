"""Sparse batches against plain lists: `KeyedJaggedTensor`, `JaggedTensor` and `KeyedTensor`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recstore_ops.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

pytestmark = pytest.mark.tier("quick")

Bags = dict[str, list[list[int]]]
"""The ids of each feature and example."""

INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def bags_of_features(draw: st.DrawFn) -> Bags:
    keys = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True))
    examples = draw(st.integers(0, 5))
    bag = st.lists(INT64, max_size=3)
    return {key: draw(st.lists(bag, min_size=examples, max_size=examples)) for key in keys}


def batch_of(bags: Bags, weighted: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    flat = [bag for feature in bags.values() for bag in feature]
    values = torch.tensor([value for bag in flat for value in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in flat], dtype=dtype)
    return KeyedJaggedTensor(list(bags), values, weights_for(values) if weighted else None, lengths)


def weights_for(values: Tensor) -> Tensor:
    """Weights that tell which value each belongs to."""
    return (values % 1000).to(torch.float32)


def bags_of(batch: KeyedJaggedTensor) -> Bags:
    return {key: [bag.tolist() for bag in feature.to_dense()] for key, feature in batch.to_dict().items()}


def assert_holds(batch: KeyedJaggedTensor, bags: Bags) -> None:
    """Holds everything that a batch tells about itself against the lists."""
    flat = [bag for feature in bags.values() for bag in feature]
    lengths = [len(bag) for bag in flat]
    assert batch.keys() == list(bags)
    assert bags_of(batch) == bags
    assert batch.lengths().tolist() == lengths
    assert batch.offsets().tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    assert batch.length_per_key() == [sum(map(len, feature)) for feature in bags.values()]
    assert batch.offset_per_key() == [sum(batch.length_per_key()[:count]) for count in range(len(bags) + 1)]
    assert batch.stride() == len(flat) // len(bags) if bags else batch.lengths().numel() == 0
    for key, feature in bags.items():
        assert [bag.tolist() for bag in batch[key].to_dense()] == feature
    if batch.weights_or_none() is not None:
        assert torch.equal(batch.weights(), weights_for(batch.values()))
        for part in batch.to_dict().values():
            assert torch.equal(part.weights(), weights_for(part.values()))


@settings(deadline=None)
@given(bags_of_features(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_a_batch_holds_the_bags_it_was_made_of(bags: Bags, weighted: bool, dtype: torch.dtype) -> None:
    batch = batch_of(bags, weighted, dtype)
    assert_holds(batch, bags)
    assert batch.lengths().dtype == batch.offsets().dtype == dtype


@settings(deadline=None)
@given(bags_of_features(), st.booleans())
def test_lengths_and_offsets_make_the_same_batch(bags: Bags, weighted: bool) -> None:
    batch = batch_of(bags, weighted)
    weights = batch.weights_or_none()
    keys, values, lengths, offsets = batch.keys(), batch.values(), batch.lengths(), batch.offsets()
    for other in (
        KeyedJaggedTensor(keys, values, weights, offsets=offsets),
        KeyedJaggedTensor(keys, values, weights, lengths, offsets, stride=batch.stride()),
        KeyedJaggedTensor.from_lengths_sync(keys, values, lengths, weights),
        KeyedJaggedTensor.from_offsets_sync(keys, values, offsets, weights),
        KeyedJaggedTensor.from_jt_dict(batch.to_dict()),
    ):
        assert_holds(other, bags)


TOLD = ("stride", "stride_per_key", "length_per_key", "lengths_offset_per_key", "offset_per_key", "index_per_key")


@settings(deadline=None)
@given(bags_of_features(), st.booleans(), st.data())
def test_a_batch_is_made_of_what_another_tells_and_of_nothing_else(
    bags: Bags, of_offsets: bool, data: st.DataObject
) -> None:
    batch = batch_of(bags)
    told = {name: getattr(batch, name)() for name in TOLD}
    given = {"keys": batch.keys(), "values": batch.values()}
    given |= {"offsets": batch.offsets()} if of_offsets else {"lengths": batch.lengths()}
    assert_holds(KeyedJaggedTensor(**given, **told), bags)
    name, other = data.draw(st.sampled_from(TOLD)), data.draw(st.integers(-9, 9).filter(bool))
    if name == "stride":
        changed: Any = told[name] + other
    else:
        changed = copy.copy(told[name])
        changed[data.draw(st.sampled_from(list(changed) if name == "index_per_key" else range(len(changed))))] += other
    for rest in ({}, told):
        with pytest.raises(ValueError, match=name if not rest else ""):
            KeyedJaggedTensor(**given, **{**rest, name: changed})


@settings(deadline=None)
@given(bags_of_features(), st.booleans(), st.data())
def test_permute_chooses_features_in_the_order_given(bags: Bags, weighted: bool, data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(bags) - 1), min_size=1, unique=True))
    keys = [list(bags)[index] for index in order]
    assert_holds(batch_of(bags, weighted).permute(order), {key: bags[key] for key in keys})


@settings(deadline=None)
@given(bags_of_features(), st.booleans(), st.data())
def test_split_and_concat_are_inverse(bags: Bags, weighted: bool, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(bags)))
    parts = batch_of(bags, weighted).split([cut, len(bags) - cut])
    assert_holds(parts[0], dict(list(bags.items())[:cut]))
    assert_holds(parts[1], dict(list(bags.items())[cut:]))
    whole = [part for part in parts if part.keys()]
    assert_holds(KeyedJaggedTensor.concat(whole), bags)


@settings(deadline=None)
@given(bags_of_features())
def test_a_batch_can_be_copied_and_pickled(bags: Bags) -> None:
    batch = batch_of(bags, weighted=True)
    assert_holds(copy.deepcopy(batch), bags)
    assert_holds(pickle.loads(pickle.dumps(batch)), bags)
    assert_holds(batch.to("cpu"), bags)


@settings(deadline=None)
@given(st.lists(st.lists(INT64, max_size=4), max_size=5), st.sampled_from([None, 0, 1, 2, 7]))
def test_padded_rows_are_bags_cut_or_filled_up(bags: list[list[int]], length: int | None) -> None:
    feature = batch_of({"a": bags})["a"]
    size = max(map(len, bags), default=0) if length is None else length
    padded = feature.to_padded_dense(length, padding_value=-5)
    assert padded.shape == (len(bags), size)
    assert padded.tolist() == [(bag + [-5] * size)[:size] for bag in bags]


@pytest.mark.parametrize(
    ("length", "padding", "error", "message"),
    [
        (-1, 0.0, ValueError, "desired_length must not be negative, got -1"),
        (2.5, 0.0, TypeError, "desired_length must be an int, got float"),
        ("2", 0.0, TypeError, "desired_length must be an int, got str"),
        (2, 1.5, ValueError, r"padding_value must be a whole number for values of torch.int64, got 1.5"),
        (2, float("nan"), ValueError, "padding_value must be a whole number for values of torch.int64, got nan"),
        (2, float("inf"), ValueError, "padding_value must be a whole number for values of torch.int64, got inf"),
    ],
)
def test_padded_rows_refuse_what_they_cannot_be(
    length: Any, padding: float, error: type[Exception], message: str
) -> None:
    feature = JaggedTensor(torch.arange(3), torch.arange(3), torch.tensor([1, 2]))
    for pad in (feature.to_padded_dense, feature.to_padded_dense_weights):
        with pytest.raises(error, match=message):
            pad(length, padding)


def test_padded_rows_take_what_fits_their_type() -> None:
    feature = JaggedTensor(torch.arange(3), torch.arange(3) * 0.5, torch.tensor([1, 2]))
    assert feature.to_padded_dense(torch.tensor(2), 7.0).tolist() == [[0, 7], [1, 2]]  # type: ignore[arg-type]
    weights = feature.to_padded_dense_weights(2, 1.5)
    assert weights is not None
    assert weights.tolist() == [[0.0, 1.5], [0.5, 1.0]]


def test_padded_rows_of_vectors_pass_their_gradient_on() -> None:
    rows = torch.arange(6.0).reshape(3, 2).requires_grad_()
    padded = JaggedTensor(rows, lengths=torch.tensor([1, 0, 2])).to_padded_dense(1)
    assert padded.tolist() == [[[0.0, 1.0]], [[0.0, 0.0]], [[2.0, 3.0]]]
    padded.sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_a_batch_without_features_is_empty() -> None:
    batch = KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0, dtype=torch.int64))
    assert_holds(batch, {})
    assert batch.to_dict() == {}


def test_a_batch_moves_to_a_device_whole() -> None:
    batch = batch_of({"a": [[1], [2, 3]]}, weighted=True).to("meta")
    assert batch.device() == torch.device("meta")
    tensors = (batch.values(), batch.weights(), batch.lengths(), batch.offsets())
    assert all(tensor.is_meta for tensor in tensors)
    feature = batch_of({"a": [[1]]}, weighted=True)["a"].to("meta")
    assert feature.device() == feature.weights().device == feature.lengths().device == torch.device("meta")


def test_batches_and_parts_print_their_bags() -> None:
    batch = batch_of({"a": [[1], [2, 3]]})
    assert repr(batch) == "KeyedJaggedTensor({'a': [[1], [2, 3]]})"
    assert repr(batch["a"]) == "JaggedTensor([[1], [2, 3]])"


IDS = torch.arange(4)


def refused(**changes: Any) -> dict[str, Any]:
    return {"keys": ["a", "b"], "values": IDS, "lengths": torch.tensor([1, 0, 3, 0]), **changes}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (refused(lengths=None), ValueError, "lengths or offsets must be given"),
        (refused(lengths=[1, 0, 3, 0]), TypeError, "lengths must be an int32 or int64 tensor, got list"),
        (refused(lengths=torch.ones(4)), TypeError, "lengths must be an int32 or int64 tensor, got torch.float32"),
        (refused(lengths=torch.ones(1, 2, 2).long()), ValueError, r"must be 1-D or 2-D, got the shape \(1, 2, 2\)"),
        (refused(lengths=None, offsets=torch.ones(2, 2).long()), ValueError, "offsets must be 1-D, got the shape"),
        (refused(lengths=torch.tensor([1, 1, 1, 2])), ValueError, "lie within the 4 values, from 0 on, got 0 to 5"),
        (refused(lengths=torch.tensor([5, 0, 0, -1])), ValueError, "no bag has a negative length, got -1 for bag 3"),
        (refused(lengths=torch.tensor([1, 0, 3])), ValueError, "3 bags cannot be shared out over 2 keys"),
        (refused(lengths=None, offsets=torch.tensor([1, 2, 4])), ValueError, "from 0 on, got 1 to 4"),
        (refused(lengths=None, offsets=torch.tensor([0, 4, 1, 2, 4])), ValueError, "negative length, got -3 for bag 1"),
        (refused(offsets=torch.tensor([0, 4])), ValueError, "offsets of 1 bags do not fit 4 lengths"),
        (refused(offsets=torch.tensor([0, 0, 0, 0, 4])), ValueError, "lengths and offsets do not agree"),
        (refused(values=[1, 2]), TypeError, "values must be a tensor, got list"),
        (refused(values=torch.tensor(1)), ValueError, "values must have at least one dimension"),
        (refused(weights=[1.0] * 4), TypeError, "weights must be a tensor, got list"),
        (refused(weights=torch.ones(3)), ValueError, "expected 4 weights, one a value, got the shape"),
        (refused(keys=["a", "a"]), ValueError, "keys must be distinct"),
        (refused(keys=[]), ValueError, "4 bags cannot be shared out over 0 keys"),
        (refused(keys="ab"), TypeError, 'keys must be a list of str, got the str "ab"'),
        (refused(keys=["a", 1]), TypeError, "keys must be a list of str, got int at place 1"),
        (refused(index_per_key={"a": 0}), ValueError, "index_per_key must be the place of each of the keys"),
        (refused(index_per_key={"a": 0, "b": 1, "c": 1}), ValueError, "index_per_key must be the place of each of"),
        (refused(keys=["a", "a"], index_per_key={"b": 0}), ValueError, "index_per_key must be the place of each of"),
        (
            refused(keys=[], values=IDS[:0], lengths=IDS[:0], stride=-1),
            ValueError,
            "stride must not be negative, got -1",
        ),
        (refused(stride=-2), ValueError, "stride must not be negative, got -2"),
        (refused(stride=3), ValueError, "2 keys with a stride of 3 need 6 bags, got 4"),
    ],
)
def test_a_batch_refuses_what_does_not_fit_together(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KeyedJaggedTensor(**arguments)


def test_operations_on_batches_refuse_what_does_not_fit_together() -> None:
    batch, weighted = batch_of({"a": [[1]], "b": [[2]]}), batch_of({"c": [[1]]}, weighted=True)
    longer = batch_of({"d": [[1], [2]]})
    with pytest.raises(KeyError, match='there is no feature "x" among'):
        batch["x"]
    with pytest.raises(ValueError, match="this KeyedJaggedTensor has no weights"):
        batch.weights()
    with pytest.raises(ValueError, match="this JaggedTensor has no weights"):
        batch["a"].weights()
    with pytest.raises(ValueError, match="segments must add up to 2 features"):
        batch.split([1])
    for indices in ([2], [-1]):
        with pytest.raises(ValueError, match=r"indices must be within \[0, 2\)"):
            batch.permute(indices)
    with pytest.raises(ValueError, match=r"indices_tensor must hold the indices \[1, 0\]"):
        batch.permute([1, 0], torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="keys must be distinct"):
        KeyedJaggedTensor.concat([batch, batch])
    with pytest.raises(ValueError, match="equally many examples"):
        KeyedJaggedTensor.concat([batch, longer])
    with pytest.raises(ValueError, match="either all features must have weights or none"):
        KeyedJaggedTensor.concat([batch, weighted])
    with pytest.raises(ValueError, match="at least one"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(ValueError, match="at least one"):
        KeyedJaggedTensor.from_jt_dict({})


PARTS = {"user": torch.randn(3, 4), "item": torch.randn(3, 2), "day": torch.randn(3, 1)}


def test_a_keyed_tensor_gives_its_parts_back() -> None:
    keyed = KeyedTensor.from_tensor_list(list(PARTS), list(PARTS.values()))
    assert keyed.keys() == list(PARTS)
    assert keyed.key_dim() == 1
    assert keyed.length_per_key() == [4, 2, 1]
    assert keyed.offset_per_key() == [0, 4, 6, 7]
    assert torch.equal(keyed.values(), torch.cat(list(PARTS.values()), dim=1))
    assert keyed.device() == torch.device("cpu")
    assert keyed.to("meta").values().is_meta
    for parts in (keyed.to_dict(), {key: keyed[key] for key in PARTS}):
        assert all(torch.equal(parts[key], PARTS[key]) for key in PARTS)
    assert repr(keyed) == "KeyedTensor({'user': 4, 'item': 2, 'day': 1}, values of shape (3, 7))"


def test_regroup_joins_parts_of_several_tensors_by_name() -> None:
    first = KeyedTensor.from_tensor_list(["user", "item"], [PARTS["user"], PARTS["item"]])
    second = KeyedTensor.from_tensor_list(["day"], [PARTS["day"]])
    grouped = KeyedTensor.regroup([first, second], [["day", "user"], ["item"], ["day"]])
    assert torch.equal(grouped[0], torch.cat([PARTS["day"], PARTS["user"]], dim=1))
    assert torch.equal(grouped[1], PARTS["item"])
    assert torch.equal(grouped[2], PARTS["day"])


def test_a_keyed_tensor_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="keys must be distinct"):
        KeyedTensor(["a", "a"], [1, 1], torch.ones(3, 2))
    for keys, got in (("ab", 'the str "ab"'), ([1, 2], "int at place 0")):
        with pytest.raises(TypeError, match=f"keys must be a list of str, got {got}"):
            KeyedTensor(keys, [1, 1], torch.ones(3, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 keys need as many lengths, got 1"):
        KeyedTensor(["a", "b"], [2], torch.ones(3, 2))
    with pytest.raises(ValueError, match="does not add up to the 2 columns"):
        KeyedTensor(["a", "b"], [1, 2], torch.ones(3, 2))
    keyed = KeyedTensor(["a", "b"], [1, 1], torch.ones(3, 2))
    with pytest.raises(KeyError, match='there is no part "x"'):
        keyed["x"]
    with pytest.raises(KeyError, match='there is no part "x" among'):
        KeyedTensor.regroup([keyed], [["a", "x"]])
