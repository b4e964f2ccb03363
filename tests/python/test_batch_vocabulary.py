"""What batches do beyond holding bags: strides of their own, copies, exchange, printing, TorchScript, `torch.fx`.

Expected values are written out, or follow from plain lists of bags.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from recstore_ops import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
)
from recstore_ops.sparse import ComputeJTDictToKJT, ComputeKJTToJTDict, jt_is_equal, kjt_is_equal

pytestmark = pytest.mark.tier("quick")

IDS = torch.tensor([1, 2, 3, 4, 5, 6])
LENGTHS = torch.tensor([1, 1, 1, 3])
INVERSE = (["b", "a"], torch.tensor([[0, 0, 0, 0], [2, 0, 1, 2]]))


def variable(**more: Any) -> KeyedJaggedTensor:
    """Feature a has three examples, of one id each, and b has one of three ids."""
    return KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[3], [1]], **more)


def lists(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in part.to_dense()] for key, part in batch.to_dict().items()}


def test_features_have_strides_of_their_own() -> None:
    batch = variable()
    assert batch.variable_stride_per_key()
    assert (batch.stride(), batch.stride_per_key(), batch.stride_per_key_per_rank()) == (3, [3, 1], [[3], [1]])
    assert batch.lengths_offset_per_key() == [0, 3, 4]
    assert (batch.length_per_key(), batch.offset_per_key()) == ([3, 3], [0, 3, 6])
    assert lists(batch) == {"a": [[1], [2], [3]], "b": [[4, 5, 6]]}
    assert batch["b"].to_dense()[0].tolist() == [4, 5, 6]
    assert variable(inverse_indices=INVERSE).stride() == 4


def test_parts_of_a_batch_keep_their_strides() -> None:
    assert lists(variable().permute([1, 0])) == {"b": [[4, 5, 6]], "a": [[1], [2], [3]]}
    parts = variable().split([1, 1])
    assert [part.stride_per_key() for part in parts] == [[3], [1]]
    joined = KeyedJaggedTensor.concat(parts)
    assert joined.stride_per_key_per_rank() == [[3], [1]]
    assert kjt_is_equal(joined, variable())
    assert joined.length_per_key_or_none() == [3, 3]
    assert KeyedJaggedTensor.concat([variable()]).length_per_key_or_none() is None
    assert kjt_is_equal(KeyedJaggedTensor.from_jt_dict(variable().to_dict()), variable())


def test_a_feature_comes_twice_from_permute_alone() -> None:
    twice = variable().permute([1, 0, 1])
    assert twice.keys() == ["b", "a", "b"]
    assert twice.values().tolist() == [4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert twice["b"].values().tolist() == [4, 5, 6]
    assert variable().permute([]).keys() == []


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 0, 1], [0, 0], [1, 1, 0, 0]])
@pytest.mark.parametrize("make", [variable, lambda: KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS)])
def test_a_batch_with_a_feature_twice_is_cut_and_joined(
    make: Callable[[], KeyedJaggedTensor], order: list[int]
) -> None:
    batch, twice = make(), make().permute(order)
    places = {key: place for place, key in enumerate(twice.keys())}
    for cut in range(len(order) + 1):
        parts = twice.split([cut, len(order) - cut])
        assert parts[0].keys() + parts[1].keys() == twice.keys()
        assert torch.equal(torch.cat([part.values() for part in parts]), twice.values())
        assert all(jt_is_equal(part[key], batch[key]) for part in parts for key in part.index_per_key())
    for same in (KeyedJaggedTensor.concat([twice]), twice.split([len(order)])[0], twice.flatten_lengths()):
        assert kjt_is_equal(same, twice)
        assert same.index_per_key() == places
    other = KeyedJaggedTensor.from_jt_dict({"c": batch["a"]})
    if not batch.variable_stride_per_key():
        assert KeyedJaggedTensor.concat([other, twice]).index_per_key() == {
            "c": 0,
            **{key: place + 1 for key, place in places.items()},
        }
    with pytest.raises(ValueError, match="keys must be distinct, got a in two batches"):
        KeyedJaggedTensor.concat([batch.split([1, 1])[0], twice])


def test_inverse_indices_stay_with_all_features() -> None:
    batch = variable(inverse_indices=INVERSE)
    for part in (batch.split([2])[0], batch.split([0, 2, 0])[1]):
        assert part is batch
    assert [part.inverse_indices_or_none() for part in batch.split([1, 1])] == [None, None]
    assert batch.permute([0, 1]).inverse_indices_or_none() is None


def test_lengths_and_offsets_are_computed_when_they_are_asked_for() -> None:
    batch = KeyedJaggedTensor(["a"], IDS, offsets=torch.tensor([0, 2, 6]))
    assert (batch.lengths_or_none(), batch.length_per_key_or_none(), batch.offset_per_key_or_none()) == (None,) * 3
    assert batch.sync().length_per_key_or_none() == [6]
    assert batch.offset_per_key_or_none() == [0, 6]
    assert batch.unsync().length_per_key_or_none() is batch.offset_per_key_or_none() is None
    feature = JaggedTensor(IDS, lengths=torch.tensor([2, 4]))
    assert feature.offsets_or_none() is None
    assert feature.offsets() is feature.offsets_or_none()


def test_what_inference_mode_computes_is_not_kept(table_name: Callable[[], str]) -> None:
    bags = RecStoreEmbeddingBagCollection([EmbeddingBagConfig(table_name(), None, 2, ["a"])])
    batch = KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([2, 4]))
    with torch.inference_mode():
        bags(batch)
    assert batch.offsets_or_none() is None
    bags(batch).sum().backward()
    assert bags._trace


def test_numbers_that_are_given_are_not_computed() -> None:
    given = {"stride_per_key": [2, 2], "length_per_key": [2, 4], "offset_per_key": [0, 2, 6]}
    batch = KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([1, 1, 1, 3]), **given)
    assert batch.length_per_key() is given["length_per_key"]
    features = {"a": JaggedTensor(IDS, lengths=torch.tensor([6]))}
    assert KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([6]), jt_dict=features).to_dict() is features


def test_a_batch_elsewhere_is_made_without_a_look_at_its_numbers() -> None:
    there = KeyedJaggedTensor(["a", "b"], IDS.to("meta"), lengths=LENGTHS.to("meta"), length_per_key=[2, 4])
    assert there.offset_per_key() == [0, 2, 6]
    indices = torch.empty(2, 4, dtype=torch.int64, device="meta")
    assert variable(inverse_indices=(["a", "b"], indices)).stride() == 4


def test_programs_take_batches_that_are_told_of_their_keys() -> None:
    def program(values: Tensor, lengths: Tensor) -> Tensor:
        told = {"length_per_key": [3, 3], "index_per_key": {"a": 0, "b": 1}, "stride": 2}
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths, **told)["b"].values()

    lengths = torch.tensor([1, 2, 3, 0])
    traced: Any = torch.jit.trace(program, (IDS, lengths))
    for made in (torch.compile(program, backend="eager", fullgraph=True), traced):
        assert made(IDS, lengths).tolist() == [4, 5, 6]


def test_values_behind_the_last_bag_belong_to_none(table_name: Callable[[], str]) -> None:
    lengths = torch.tensor([1, 2])
    assert [bag.tolist() for bag in JaggedTensor(IDS, lengths=lengths).to_dense()] == [[1], [2, 3]]
    batch = KeyedJaggedTensor(["a"], IDS, lengths=lengths)
    with pytest.raises(ValueError, match="the bags must cover the 6 values, from 0 on, got 0 to 3"):
        batch.to_dict()
    bags = RecStoreEmbeddingBagCollection([EmbeddingBagConfig(table_name(), None, 2, ["a"])])
    with pytest.raises(ValueError, match="the bags must cover the 6 values, from 0 on, got 0 to 3"):
        bags(batch)


def test_batches_without_bags() -> None:
    feature = JaggedTensor.empty(True, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert (feature.values().dtype, feature.weights().dtype) == (torch.int64, torch.float64)
    assert feature.to_dense() == []
    assert KeyedJaggedTensor.empty().keys() == []
    assert KeyedJaggedTensor([], IDS[:0]).to_dict() == {}
    none = torch.empty(0)
    for given in ({"lengths": none}, {"offsets": none}):
        assert KeyedJaggedTensor(["a"], none, **given)["a"].to_dense() == []
    like = KeyedJaggedTensor.empty_like(KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([2, 4])))
    assert (like.keys(), like.stride(), like.values().dtype) == ([], 2, torch.int64)
    there = KeyedJaggedTensor.empty_like(variable(inverse_indices=INVERSE), torch.device("meta"))
    assert there.values().is_meta
    assert there.inverse_indices()[1].is_meta
    assert JaggedTensor.empty_like(feature, torch.device("meta")).values().is_meta
    assert JaggedTensor.empty_like(feature).values().dtype == torch.int64


def test_dense_bags_become_jagged_and_back() -> None:
    bags, weights = [IDS[:2], IDS[2:2], IDS[2:]], [IDS[:2] * 0.5, IDS[2:2] * 0.5, IDS[2:] * 0.5]
    feature = JaggedTensor.from_dense(bags, weights)
    assert feature.lengths().tolist() == [2, 0, 4]
    assert [bag.tolist() for bag in feature.to_dense_weights() or []] == [weight.tolist() for weight in weights]
    padded = feature.to_padded_dense_weights(3, -1.0)
    assert padded is not None
    assert padded.tolist() == [[0.5, 1.0, -1.0], [-1.0] * 3, [1.5, 2.0, 2.5]]
    taken = JaggedTensor.from_dense_lengths(IDS.view(2, 3), torch.tensor([1, 2]), IDS.view(2, 3) * 0.5)
    assert (taken.values().tolist(), taken.weights().tolist()) == ([1, 4, 5], [0.5, 2.0, 2.5])
    graph = fx.symbolic_trace(JaggedTensor.from_dense_lengths)
    assert jt_is_equal(graph(IDS.view(2, 3), torch.tensor([1, 2]), IDS.view(2, 3) * 0.5), taken)
    assert graph(IDS.view(2, 3), torch.tensor([3, 3])).weights_or_none() is None
    assert JaggedTensor(IDS, lengths=torch.tensor([6])).to_dense_weights() is None
    assert JaggedTensor(IDS, lengths=torch.tensor([6])).to_padded_dense_weights() is None


def test_batches_are_copied_whole() -> None:
    batch = variable(weights=torch.ones(6), inverse_indices=INVERSE)
    for copied in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu", dtype=torch.float64)):
        assert type(copied) is KeyedJaggedTensor
        assert lists(copied) == lists(batch)
        assert torch.equal(copied.inverse_indices()[1], INVERSE[1])
    assert batch.to("cpu", dtype=torch.float64).weights().dtype == torch.float64
    moved = batch.to("meta")
    assert moved.inverse_indices()[1].is_meta
    assert moved.length_per_key() == [3, 3]
    assert KeyedJaggedTensor(["a", "b", "c"], IDS[:5].to("meta"), lengths=LENGTHS[:3].to("meta")).length_per_key() == [
        *(3, 1, 1)
    ]
    whole = KeyedJaggedTensor(["a"], IDS.clone(), lengths=torch.tensor([2, 4]))
    whole.offsets()
    whole.copy_(KeyedJaggedTensor(["a"], IDS * 2, lengths=torch.tensor([5, 1])))
    assert (whole.values().tolist(), whole.offsets().tolist()) == ((IDS * 2).tolist(), [0, 5, 6])
    filled = variable(weights=torch.zeros(6), inverse_indices=(["b", "a"], torch.zeros(2, 4, dtype=torch.int64)))
    assert torch.equal(filled.copy_(batch).weights(), torch.ones(6))
    assert torch.equal(filled.inverse_indices()[1], INVERSE[1])


def whole(keys: tuple[str, ...] = ("a", "b"), lengths: tuple[int, ...] = (1, 2, 0, 3), **more: Any) -> Any:
    lengths_of_all = torch.tensor(lengths)
    return KeyedJaggedTensor(list(keys), torch.arange(sum(lengths)), lengths=lengths_of_all, **more).sync()


COLUMNS = torch.arange(6.0).reshape(2, 3)
NOT_COPIED: dict[str, tuple[Any, Any, str]] = {
    "a value for all": (whole(), whole(lengths=(1, 0, 0, 0)), r"values of the shape \(6,\), got \(1,\)"),
    "more values": (whole(), whole(lengths=(1, 2, 0, 4)), r"values of the shape \(6,\), got \(7,\)"),
    "a length for all": (whole(), whole(lengths=(3, 3)), r"lengths of the shape \(4,\), got \(2,\)"),
    "lengths in rows": (
        whole(),
        KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS.view(2, 2)),
        r"lengths of the shape \(4,\), got \(2, 2\)",
    ),
    "other keys": (whole(), whole(("a", "c")), r"the keys \['a', 'b'\], got \['a', 'c'\]"),
    "keys in another order": (whole(), whole(("b", "a")), r"the keys \['a', 'b'\], got \['b', 'a'\]"),
    "weights here": (whole(weights=IDS * 0.5), whole(), "weights in both batches or in none, the other has none"),
    "weights there": (whole(), whole(weights=IDS * 0.5), "weights in both batches or in none, this has none"),
    "weights of rows": (
        whole(weights=IDS * 0.5),
        whole(weights=torch.ones(6, 1)),
        r"weights of the shape \(6,\), got \(6, 1\)",
    ),
    "inverse indices here": (variable(inverse_indices=INVERSE), variable(), "inverse_indices in both batches"),
    "inverse indices there": (variable(), variable(inverse_indices=INVERSE), "inverse_indices in both batches"),
    "fewer inverse indices": (
        variable(inverse_indices=INVERSE),
        variable(inverse_indices=(["b", "a"], INVERSE[1][:, :1])),
        r"inverse_indices of the shape \(2, 4\), got \(2, 1\)",
    ),
    "a feature of one bag": (
        JaggedTensor(IDS, lengths=torch.tensor([2, 4])),
        JaggedTensor(IDS, offsets=torch.tensor([0, 6])),
        r"lengths of the shape \(2,\), got \(1,\)",
    ),
    "columns of others": (
        KeyedTensor(["a", "b"], [1, 2], COLUMNS),
        KeyedTensor(["a", "b"], [2, 1], COLUMNS),
        r"the length_per_key \[1, 2\], got \[2, 1\]",
    ),
}


def state_of(batch: Any) -> dict[str, Any]:
    return {name: repr(value) for name, value in vars(batch).items()}


@pytest.mark.parametrize("case", NOT_COPIED)
def test_a_batch_that_is_not_like_another_is_left_as_it_was(case: str) -> None:
    own, other, message = NOT_COPIED[case]
    before = state_of(own)
    with pytest.raises(ValueError, match=f"copy_ needs .*{message}"):
        own.copy_(other)
    assert state_of(own) == before


def test_a_copied_batch_tells_what_the_other_does() -> None:
    told = {"lengths_offset_per_key": [0, 2, 4], "stride_per_key": [2, 2], "index_per_key": {"a": 0, "b": 1}}
    for own in (whole(), whole(**told), variable(), whole().unsync()):
        own = copy.deepcopy(own)
        own.to_dict()
        for other in (whole(lengths=(0, 0, 5, 1)), variable(), whole(lengths=(2, 2, 1, 1), **told).unsync()):
            assert kjt_is_equal(own.copy_(other), other)
            assert lists(own) == lists(other)
            assert own.lengths_offset_per_key() == other.lengths_offset_per_key()
            assert own["b"].to_dense()[0].tolist() == other["b"].to_dense()[0].tolist()


def test_a_batch_knows_and_frees_its_bytes() -> None:
    batch = KeyedJaggedTensor(["a"], IDS.clone(), lengths=torch.tensor([2, 4]))
    assert batch.size_in_bytes() == 6 * 8 + 2 * 8
    assert variable().size_in_bytes() == 6 * 8 + 4 * 8 + 2 * 4
    assert batch.clear_storage() == 6 * 8 + 2 * 8
    assert batch.values().untyped_storage().size() == 0


def test_batches_print_their_bags_by_feature() -> None:
    batch = variable(weights=torch.full((6,), 0.5))
    assert str(variable()) == 'KeyedJaggedTensor({\n    "a": [[1], [2], [3]],\n    "b": [[4, 5, 6]]\n})\n'
    weighted = '    "b": {\n        "values": [[4, 5, 6]],\n        "weights": [[0.5, 0.5, 0.5]]\n    }\n})\n'
    assert str(batch).endswith(weighted)
    assert str(batch["b"]) == 'JaggedTensor({\n    "values": [[4, 5, 6]],\n    "weights": [[0.5, 0.5, 0.5]]\n})\n'
    assert str(variable()["a"]) == "JaggedTensor({\n    [[1], [2], [3]]\n})\n"
    assert str(KeyedTensor(["a"], [2], torch.ones(1, 2))) == 'KeyedTensor({\n    "a": [[1.0, 1.0]]\n})\n'
    for none in (KeyedJaggedTensor.empty(), *(KeyedJaggedTensor.empty_like(each) for each in (batch, variable()))):
        assert str(none) == "KeyedJaggedTensor()\n"


def test_ranks_exchange_features() -> None:
    """Two ranks own a feature each; both send, and both make the batch of all examples of theirs."""
    first, second = ({"a": [[1], []], "b": [[2, 3], [4]]}, {"a": [[5, 6]], "b": [[]]})
    sent = []
    for bags in (first, second):
        flat = [bag for feature in bags.values() for bag in feature]
        values, lengths = torch.tensor([each for bag in flat for each in bag]), torch.tensor([len(bag) for bag in flat])
        batch = KeyedJaggedTensor(["a", "b"], values, values * 0.5, lengths)
        assert batch.dist_labels() == ["lengths", "values", "weights"]
        splits = batch.dist_splits([1, 1])
        sent.append([tensor.split(split) for tensor, split in zip(batch.dist_tensors(), splits, strict=True)])
    for rank, key in enumerate("ab"):
        tensors = [torch.cat([parts[what][rank] for parts in sent]) for what in range(3)]
        got = KeyedJaggedTensor.dist_init([key], tensors, False, 2, None, [2, 1])
        assert lists(got) == {key: first[key] + second[key]}
        assert torch.equal(got.weights(), got.values() * 0.5)
    # And one rank that owns both.
    tensors = [torch.cat([torch.cat(parts[what]) for parts in sent]) for what in range(3)]
    got = KeyedJaggedTensor.dist_init(["a", "b"], tensors, False, 2, torch.tensor([0, 1, 4, 2, 3, 5]), [2, 1])
    assert lists(got) == {key: first[key] + second[key] for key in "ab"}


def test_ranks_exchange_features_with_strides_of_their_own() -> None:
    batch = variable()
    assert batch.dist_labels() == ["lengths", "values", "strides"]
    assert batch.dist_splits([1, 1]) == [[3, 1], [3, 3], [1, 1]]
    tensors = [torch.cat([tensor, tensor]) for tensor in batch.dist_tensors()]
    got = KeyedJaggedTensor.dist_init(["a", "b"], tensors, True, 2, torch.tensor([0, 2, 1, 3]), None)
    assert got.stride_per_key_per_rank() == [[3, 3], [1, 1]]
    assert lists(got) == {"a": [[1], [2], [3]] * 2, "b": [[4, 5, 6]] * 2}
    none = [tensor[:0] for tensor in batch.dist_tensors()]
    assert KeyedJaggedTensor.dist_init([], none, True, 2, None, None).keys() == []
    staggered = [torch.cat([tensor] * 4) for tensor in batch.dist_tensors()]
    staggered[2][2] = 3
    made = KeyedJaggedTensor.dist_init(["a", "b"], staggered, True, 4, None, None, stagger=2)
    assert made.stride_per_key_per_rank()[0] == [3, 3, 3, 3]


def test_batches_of_strides_are_containers_of_tensors() -> None:
    batch = variable(weights=torch.ones(6), inverse_indices=INVERSE)
    leaves, spec = pytree.tree_flatten(batch)
    again: Any = pytree.tree_unflatten(leaves, spec)
    assert len(leaves) == 4
    assert kjt_is_equal(again, batch)
    assert torch.equal(again.inverse_indices()[1], INVERSE[1])


def test_equal_batches_are_told_from_others() -> None:
    feature = JaggedTensor(IDS, lengths=torch.tensor([2, 4]))
    assert jt_is_equal(feature, JaggedTensor(IDS, offsets=torch.tensor([0, 2, 6])))
    for other in (JaggedTensor(IDS, IDS * 0.5, torch.tensor([2, 4])), JaggedTensor(IDS, lengths=torch.tensor([6])), 1):
        assert not jt_is_equal(feature, other)  # type: ignore[arg-type]
    for other in (variable().permute([1, 0]), variable(weights=torch.ones(6)), 1):
        assert not kjt_is_equal(variable(), other)  # type: ignore[arg-type]
    told = variable(length_per_key=[3, 3])
    told._length_per_key = [2, 4]  # As a batch on a GPU may be told, whose lengths are not read.
    assert not kjt_is_equal(told, variable())


def test_modules_take_batches_apart_and_join_them() -> None:
    assert kjt_is_equal(ComputeJTDictToKJT()(ComputeKJTToJTDict()(variable())), variable())


class Scripted(nn.Module):
    """What TorchScript compiles of all three classes."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, list[str], Tensor, KeyedJaggedTensor]:
        swapped = features.permute([1, 0])
        parts = swapped.split([1, 1])
        joined = KeyedJaggedTensor.concat([parts[1], parts[0]])
        columns = KeyedTensor.from_tensor_list(["x", "y"], [torch.ones(2, 1), torch.zeros(2, 2)])
        first = KeyedTensor.regroup([columns], [["y", "x"]])[0]
        made = KeyedJaggedTensor.from_jt_dict({"c": joined["a"], "d": JaggedTensor.from_dense(joined["a"].to_dense())})
        return joined["a"].to_padded_dense(2), swapped.keys(), first, made


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_torch_script_compiles_the_classes(dtype: torch.dtype) -> None:
    module = Scripted()
    batch = KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS.to(dtype))
    expected, got = module(batch), torch.jit.script(module)(batch)
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1] == ["b", "a"]
    assert torch.equal(got[2], expected[2])
    assert kjt_is_equal(got[3], expected[3])


def test_torch_script_makes_batches_of_nothing() -> None:
    like = torch.jit.script(KeyedJaggedTensor.empty_like)(variable())
    assert (like.keys(), like.stride_per_key_per_rank(), like.values().numel()) == ([], [[3], [1]], 0)
    assert torch.jit.script(JaggedTensor.empty_like)(variable()["a"]).to_dense() == []
    for empty_like, of in ((KeyedJaggedTensor.empty_like, variable()), (JaggedTensor.empty_like, variable()["a"])):
        with pytest.raises(torch.jit.Error, match="in TorchScript empty_like takes no device"):
            torch.jit.script(empty_like)(of, torch.device("meta"))


class Traced(nn.Module):
    """Batches that come in, are made on the way and go out."""

    def forward(self, features: Any, values: Tensor) -> Any:
        made = KeyedJaggedTensor(["c"], values, lengths=values)
        joined = KeyedJaggedTensor.concat([features, made])
        return joined, KeyedTensor.regroup([KeyedTensor(["x"], [1], values.unsqueeze(1))], [["x"]])


def test_symbolic_tracing_records_batches() -> None:
    module = Traced()
    batch, values = KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS), torch.tensor([1, 1])
    expected, got = module(batch, values), fx.symbolic_trace(module)(batch, values)
    assert kjt_is_equal(got[0], expected[0])
    assert torch.equal(got[1][0], expected[1][0])


def bags_over(prefix: str, **more: Any) -> RecStoreEmbeddingBagCollection:
    configs = [EmbeddingBagConfig(f"{prefix}/{key}", 9, 2, [key], pooling="mean") for key in "ab"]
    return RecStoreEmbeddingBagCollection(configs, initializer={"kind": "normal"}, **more)


@pytest.mark.parametrize("fused", [False, True])
def test_equal_bags_are_looked_up_once(fused: bool, table_name: Callable[[], str]) -> None:
    name = table_name()
    bags = bags_over(name, enable_fusion=fused, optimizer={"kind": "sgd", "lr": 1.0})
    whole = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([3, 1, 2, 3, *[4, 5, 6] * 4]), lengths=torch.tensor([1] * 4 + [3] * 4)
    )
    expected, got = bags(whole), bags(variable(inverse_indices=INVERSE))
    torch.testing.assert_close(got, expected)
    gradients = []
    for output in (expected, got):
        output.square().sum().backward()
        gradients.append({table: dict(zip(ids.tolist(), grads, strict=True)) for table, ids, grads in bags._trace})
        bags.reset_trace()
    for table, grads in gradients[0].items():
        assert grads.keys() == gradients[1][table].keys()
        for key in grads:
            torch.testing.assert_close(gradients[1][table][key], grads[key])
    SparseOptimizer(modules=[bags]).step()


def test_batches_of_strides_that_bags_refuse(table_name: Callable[[], str]) -> None:
    bags = bags_over(table_name())
    with pytest.raises(ValueError, match=r"numbers of examples, \{'a': 3, 'b': 1\}, need inverse indices"):
        bags(variable())
    lacking = (["a"], INVERSE[1][1:])
    with pytest.raises(ValueError, match=r"no inverse indices of the features \['b'\] among \['a'\]"):
        bags(variable(inverse_indices=lacking))
    with pytest.raises(ValueError, match=r"must hold each feature once, got \['a', 'b', 'a'\]"):
        bags(KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS).permute([0, 1, 0]))


def test_rows_of_features_with_strides_of_their_own(table_name: Callable[[], str]) -> None:
    name = table_name()
    rows = RecStoreEmbeddingCollection(
        [EmbeddingConfig(f"{name}/{key}", 9, 2, [key]) for key in "ab"], need_indices=True
    )
    found = rows(variable())
    assert found["b"].lengths().tolist() == [3]
    assert found["b"].weights().tolist() == [4, 5, 6]
    assert torch.equal(found["a"].values(), rows.embeddings[f"{name}/a"].weight[IDS[:3]])
    assert rows.need_indices()
    assert rows.embedding_dim() == 2
    assert rows.embedding_names_by_table() == [["a"], ["b"]]


def test_weights_count_as_the_collection_says(table_name: Callable[[], str]) -> None:
    def opened(**more: Any) -> RecStoreEmbeddingBagCollection:
        return RecStoreEmbeddingBagCollection([EmbeddingBagConfig(name, 9, 2, ["a"])], **more)

    name = table_name()
    plain = KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([6]))
    weighted = KeyedJaggedTensor(["a"], IDS, torch.full((6,), 2.0), torch.tensor([6]))
    free, never, always = opened(), opened(is_weighted=False), opened(is_weighted=True)
    assert torch.equal(never(weighted), free(plain))
    assert torch.equal(always(weighted), free(weighted))
    assert not torch.equal(free(weighted), free(plain))
    with pytest.raises(ValueError, match="the collection is_weighted, and the batch has no weights"):
        always(plain)
    assert (always.is_weighted(), never.is_weighted()) == (True, False)


def test_a_new_table_starts_with_what_its_init_fn_fills_in(table_name: Callable[[], str]) -> None:
    name = table_name()
    filled = RecStoreEmbeddingBagCollection([EmbeddingBagConfig(name, 3, 2, ["a"], init_fn=nn.init.ones_)])
    assert torch.equal(filled.embedding_bags[name].weight[torch.arange(3)], torch.ones(3, 2))
    other = RecStoreEmbeddingBagCollection([EmbeddingBagConfig(name, 3, 2, ["a"], init_fn=nn.init.zeros_)])
    assert other.embedding_bags[name].weight[[0]].tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="needs num_embeddings"):
        RecStoreEmbeddingCollection([EmbeddingConfig(table_name(), None, 2, init_fn=nn.init.ones_)])


def test_a_collection_says_its_device(table_name: Callable[[], str]) -> None:
    bags = RecStoreEmbeddingBagCollection([EmbeddingBagConfig(table_name(), 3, 2, ["a"])], device="meta")
    (weight,) = (bag.weight for bag in bags.embedding_bags.values())
    assert bags.device == weight.device == copy.deepcopy(weight).device == torch.device("meta")
    assert bags(KeyedJaggedTensor(["a"], IDS[:2], lengths=torch.tensor([2]))).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: variable(stride=7), "stride must be 3, by the bags and strides, got 7"),
        (lambda: variable(stride=3, inverse_indices=INVERSE), "stride must be 4, by the bags and strides, got 3"),
        (lambda: variable(stride_per_key=[1, 3]), r"stride_per_key must be \[3, 1\], by the bags and strides"),
        (lambda: variable(lengths_offset_per_key=[0, 1, 4]), r"lengths_offset_per_key must be \[0, 3, 4\]"),
        (lambda: variable(length_per_key=[2, 4]), r"length_per_key must be \[3, 3\], by the bags and strides, got \[2"),
        (lambda: variable(offset_per_key=[0, 2, 6]), r"offset_per_key must be \[0, 3, 6\]"),
        (
            lambda: KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[3, -1], [1, 1]]),
            "stride_per_key_per_rank must not be negative, got -1",
        ),
        (
            lambda: variable(inverse_indices=(["b", "a"], torch.tensor([[0, 1], [2, 0]]))),
            r'inverse indices of the feature "b" must be within \[0, 1\), got 1',
        ),
        (
            lambda: variable(inverse_indices=(["b", "a"], torch.tensor([[0, 0], [2, -1]]))),
            r'inverse indices of the feature "a" must be within \[0, 3\), got -1',
        ),
        (
            lambda: KeyedJaggedTensor(
                ["a", "b"], IDS, lengths=LENGTHS, inverse_indices=(["a", "b"], torch.tensor([[0, 2], [1, 1]]))
            ),
            r'inverse indices of the feature "a" must be within \[0, 2\), got 2',
        ),
        (
            lambda: variable(inverse_indices=(["a"], INVERSE[1])),
            r"inverse_indices must be \[1, examples\], got the shape \(2, 4\)",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], IDS.to("meta"), lengths=LENGTHS.to("meta"), length_per_key=[7]),
            r"the features must lie within the 6 values, from 0 on, got \[0, 7\] as their bounds",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], IDS.to("meta"), lengths=LENGTHS.to("meta"), offset_per_key=[1, 6]),
            r"from 0 on, got \[1, 6\] as their bounds",
        ),
        (lambda: KeyedTensor(["a", "b"], [3, -1], torch.ones(1, 2)), r"\[3, -1\] does not add up to the 2 columns"),
        (
            lambda: KeyedTensor(["a", "b"], [1, 1], torch.ones(1, 2), index_per_key={"a": 1, "b": 0}),
            r"index_per_key must be the place of each of the keys \['a', 'b'\], got \{'a': 1, 'b': 0\}",
        ),
        (
            lambda: variable(length_per_key=[6]),
            "length_per_key must hold 2 numbers for 2 keys, got 1",
        ),
        (lambda: variable(offset_per_key=[0, 6]), "offset_per_key must hold 3 numbers for 2 keys, got 2"),
        (
            lambda: KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[3], [1]]),
            r"stride_per_key_per_rank must be \[1, ranks\] for 1 keys, got the shape \(2, 1\)",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[3, 2]]),
            "strides of 5 examples in all need as many bags, got 4",
        ),
        (lambda: variable().inverse_indices(), "this KeyedJaggedTensor has no inverse indices"),
        (
            lambda: KeyedJaggedTensor.concat(
                [variable(), KeyedJaggedTensor(["c"], IDS, lengths=torch.tensor([2, 2, 2]))]
            ),
            "either all batches must have variable strides or none",
        ),
        (
            lambda: KeyedJaggedTensor.concat([variable(inverse_indices=INVERSE), variable()]),
            "either all batches must have inverse indices or none",
        ),
        (
            lambda: KeyedJaggedTensor.dist_init(["a"], [IDS], False, 1, None, [1]),
            "expected 2 tensors, or 3 with weights, got 1",
        ),
        (
            lambda: KeyedJaggedTensor.dist_init(["a"], [LENGTHS, IDS], False, 1, None, None),
            "stride_per_rank must be given where strides are not variable",
        ),
        (
            lambda: KeyedTensor.regroup_as_dict([KeyedTensor(["a"], [1], torch.ones(1, 1))], [["a"]], []),
            "1 groups need as many names, got 0",
        ),
        (
            lambda: KeyedTensor(["a"], [1], torch.ones(1, 1), offset_per_key=[0, 2]),
            r"offset_per_key must be \[0, 1\], got \[0, 2\]",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
