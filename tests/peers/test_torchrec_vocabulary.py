"""Our jagged and keyed tensors against TorchRec's of the same names: every method, on the same arguments.

`make test-peers` runs this in an environment with TorchRec 1.8.0 and FBGEMM 1.8.0 for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace
from torch.utils import _pytree as pytree
from torchrec.fx import symbolic_trace as torchrec_trace
from torchrec.modules import embedding_configs as torchrec_configs
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse import jagged_tensor as theirs

from recstore_ops import RecStoreEmbeddingBagCollection, RecStoreEmbeddingCollection, sparse
from recstore_ops.transfer import export_torchrec, import_torchrec

pytestmark = pytest.mark.filterwarnings("ignore")

VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
WEIGHTS = torch.tensor([1.0, 0.5, 1.5, 1.0, 0.5, 1.0, 1.0, 1.5])
LENGTHS = torch.tensor([0, 2, 0, 1, 1, 1, 3, 0], dtype=torch.int32)
OFFSETS = torch.tensor([0, 0, 2, 2, 3, 4, 5, 8, 8], dtype=torch.int32)
STRIDES = [[3], [5]]
INVERSE = (["a", "b"], torch.tensor([[0, 1, 2, 0, 1], [4, 3, 2, 1, 0]]))


def plain(value: Any) -> Any:
    """What can be compared: tensors as dtype, shape and numbers, batches as what they tell of themselves."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), None if value.is_meta else value.tolist())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    kind = type(value).__name__
    if kind == "JaggedTensor":
        return [kind, *map(plain, (value.values(), value.weights_or_none(), value.lengths(), value.offsets()))]
    if kind == "KeyedJaggedTensor":
        tensors = (value.values(), value.weights_or_none(), value.lengths(), value.offsets())
        told = (value.keys(), value.stride(), value.stride_per_key(), value.length_per_key(), value.offset_per_key())
        return [kind, *map(plain, tensors), *told, plain(value.inverse_indices_or_none())]
    if kind == "KeyedTensor":
        return [kind, value.keys(), value.length_per_key(), value.key_dim(), plain(value.values())]
    return value


def assert_alike(call: Callable[[Any], Any]) -> None:
    """Holds what a call gives of our classes against what it gives of TorchRec's."""
    assert plain(call(sparse)) == plain(call(theirs))


def jagged(kind: Any, **more: Any) -> Any:
    return kind.JaggedTensor(VALUES, **{"lengths": LENGTHS, **more})


def keyed(kind: Any, **more: Any) -> Any:
    return kind.KeyedJaggedTensor(["a", "b"], VALUES, **{"lengths": LENGTHS, **more})


def variable(kind: Any, **more: Any) -> Any:
    return keyed(kind, stride_per_key_per_rank=STRIDES, **more)


def renamed(kind: Any, batch: Any) -> Any:
    """The same bags as features of other names."""
    return kind.KeyedJaggedTensor(
        *(["c", "d"], batch.values(), batch.weights_or_none(), batch.lengths()),
        stride_per_key_per_rank=batch.stride_per_key_per_rank() or None,
    ).sync()


def told_other_sizes(batch: Any, sizes: list[int]) -> Any:
    """A batch that takes these for the numbers of its features' values, which its constructor may refuse."""
    batch._length_per_key = sizes
    return batch


JAGGED: dict[str, Callable[[Any], Any]] = {
    "lengths": lambda kind: jagged(kind),
    "offsets": lambda kind: kind.JaggedTensor(VALUES, offsets=OFFSETS),
    "weights": lambda kind: jagged(kind, weights=WEIGHTS).weights(),
    "lengths come late": lambda kind: kind.JaggedTensor(VALUES, offsets=OFFSETS).lengths_or_none(),
    "offsets come late": lambda kind: jagged(kind).offsets_or_none(),
    "lengths are kept": lambda kind: (
        (made := kind.JaggedTensor(VALUES, offsets=OFFSETS)).lengths() is made.lengths_or_none()
    ),
    "offsets are kept": lambda kind: (made := jagged(kind)).offsets() is made.offsets_or_none(),
    "no bags": lambda kind: kind.JaggedTensor(torch.empty(0), lengths=torch.empty(0)),
    "empty": lambda kind: kind.JaggedTensor.empty(),
    "empty with weights": lambda kind: kind.JaggedTensor.empty(
        True, torch.device("cpu"), torch.int64, torch.float64, torch.int64
    ),
    "empty_like": lambda kind: kind.JaggedTensor.empty_like(jagged(kind, weights=WEIGHTS)),
    "empty_like on a device": lambda kind: (
        kind.JaggedTensor.empty_like(jagged(kind), torch.device("meta")).values().to("meta")
    ),
    "from_dense": lambda kind: kind.JaggedTensor.from_dense([VALUES[:2], VALUES[2:2], VALUES[2:]]),
    "from_dense with weights": lambda kind: kind.JaggedTensor.from_dense(
        [VALUES[:2], VALUES[2:]], [WEIGHTS[:2], WEIGHTS[2:]]
    ),
    "from_dense_lengths": lambda kind: kind.JaggedTensor.from_dense_lengths(
        VALUES.view(2, 4), torch.tensor([1, 3]), WEIGHTS.view(2, 4)
    ),
    "to_dense": lambda kind: jagged(kind).to_dense(),
    "to_dense of rows": lambda kind: kind.JaggedTensor(VALUES.view(4, 2), lengths=torch.tensor([1, 3])).to_dense(),
    "to_dense_weights": lambda kind: jagged(kind, weights=WEIGHTS).to_dense_weights(),
    "to_dense_weights of none": lambda kind: jagged(kind).to_dense_weights(),
    "to_padded_dense": lambda kind: jagged(kind).to_padded_dense(),
    "to_padded_dense cuts": lambda kind: jagged(kind).to_padded_dense(2, 10.0),
    "to_padded_dense fills": lambda kind: jagged(kind).to_padded_dense(5, -1.0),
    "to_padded_dense of int64": lambda kind: kind.JaggedTensor(VALUES.long(), offsets=OFFSETS).to_padded_dense(2),
    "to_padded_dense of rows": lambda kind: kind.JaggedTensor(
        VALUES.view(4, 2), lengths=torch.tensor([1, 0, 3])
    ).to_padded_dense(2),
    "to_padded_dense_weights": lambda kind: jagged(kind, weights=WEIGHTS).to_padded_dense_weights(2, 1.0),
    "to_padded_dense_weights of none": lambda kind: jagged(kind).to_padded_dense_weights(),
    "to": lambda kind: jagged(kind, weights=WEIGHTS).to(torch.device("cpu"), non_blocking=True),
    "to another device": lambda kind: jagged(kind).to(torch.device("meta")).device(),
    "copy_": lambda kind: jagged(kind, weights=torch.zeros(8)).copy_(jagged(kind, weights=WEIGHTS)),
    "size_in_bytes": lambda kind: [
        made.size_in_bytes()
        for made in (
            *(jagged(kind, weights=WEIGHTS), kind.JaggedTensor(VALUES, offsets=OFFSETS)),
            kind.JaggedTensor(VALUES.double(), lengths=LENGTHS.long()),
        )
    ],
    "copy_ of offsets": lambda kind: kind.JaggedTensor(torch.zeros(8), offsets=torch.zeros(9, dtype=torch.int32)).copy_(
        kind.JaggedTensor(VALUES, offsets=OFFSETS.long()), non_blocking=True
    ),
    "from_dense_lengths in a graph": lambda kind: [
        graph(VALUES.view(2, 4), torch.tensor([3, 2]), weights)
        for graph in [symbolic_trace(kind.JaggedTensor.from_dense_lengths)]
        for weights in (None, WEIGHTS.view(2, 4))
    ],
    "values behind the last bag": lambda kind: kind.JaggedTensor(VALUES, lengths=torch.tensor([1, 2])).to_dense(),
    "str": lambda kind: str(jagged(kind)),
    "str with weights": lambda kind: str(jagged(kind, weights=WEIGHTS)),
    "str of rows": lambda kind: str(kind.JaggedTensor(VALUES.view(4, 2), lengths=torch.tensor([1, 3]))),
    "equal": lambda kind: kind.jt_is_equal(jagged(kind), kind.JaggedTensor(VALUES, offsets=OFFSETS)),
    "not equal": lambda kind: [
        kind.jt_is_equal(jagged(kind), other)
        for other in (jagged(kind, weights=WEIGHTS), kind.JaggedTensor(VALUES + 1, lengths=LENGTHS), 1)
    ],
    "pytree": lambda kind: pytree.tree_map(lambda each: each, jagged(kind, weights=WEIGHTS)),
}


KEYED: dict[str, Callable[[Any], Any]] = {
    "lengths": lambda kind: keyed(kind),
    "offsets": lambda kind: kind.KeyedJaggedTensor(["a", "b"], VALUES, offsets=OFFSETS),
    "from_lengths_sync": lambda kind: kind.KeyedJaggedTensor.from_lengths_sync(["a", "b"], VALUES, LENGTHS, WEIGHTS),
    "from_offsets_sync": lambda kind: kind.KeyedJaggedTensor.from_offsets_sync(["a", "b"], VALUES, OFFSETS, WEIGHTS),
    "from_lengths_sync of variable strides": lambda kind: kind.KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], VALUES, LENGTHS, stride_per_key_per_rank=STRIDES, inverse_indices=INVERSE
    ),
    "sync": lambda kind: (made := keyed(kind).sync()).length_per_key_or_none() and made.offset_per_key_or_none(),
    "unsync": lambda kind: (
        (made := keyed(kind).sync().unsync()).length_per_key_or_none() or made.offset_per_key_or_none()
    ),
    "late": lambda kind: [(made := keyed(kind)).offsets_or_none(), made.length_per_key_or_none()],
    "lengths come late": lambda kind: kind.KeyedJaggedTensor(["a"], VALUES, offsets=OFFSETS).lengths_or_none(),
    "one feature": lambda kind: keyed(kind)["b"],
    "one feature with weights": lambda kind: keyed(kind, weights=WEIGHTS)["a"],
    "one feature of variable strides": lambda kind: [variable(kind)["a"], variable(kind, weights=WEIGHTS)["b"]],
    "index_per_key": lambda kind: keyed(kind).index_per_key(),
    "lengths_offset_per_key": lambda kind: [each(kind).lengths_offset_per_key() for each in (keyed, variable)],
    "strides": lambda kind: [
        (each(kind).stride_per_key_per_rank(), each(kind).variable_stride_per_key()) for each in (keyed, variable)
    ],
    "strides of ranks": lambda kind: keyed(kind, stride_per_key_per_rank=[[1, 2], [4, 1]]).stride_per_key(),
    "stride of inverse indices": lambda kind: variable(kind, inverse_indices=INVERSE),
    "inverse_indices": lambda kind: variable(kind, inverse_indices=INVERSE).inverse_indices(),
    "to_dict": lambda kind: keyed(kind, weights=WEIGHTS).to_dict(),
    "to_dict of variable strides": lambda kind: variable(kind, weights=WEIGHTS).to_dict(),
    "to_dict without offsets": lambda kind: [
        each.offsets_or_none() for each in keyed(kind).to_dict(compute_offsets=False).values()
    ],
    "to_dict with offsets": lambda kind: [each.offsets_or_none() for each in keyed(kind).to_dict().values()],
    "empty": lambda kind: [
        (made := kind.KeyedJaggedTensor.empty(True, None, torch.int64, torch.float64)).keys(),
        *(made.values(), made.weights(), made.lengths(), made.stride(), made.to_dict()),
    ],
    "empty_like": lambda kind: [
        (made := kind.KeyedJaggedTensor.empty_like(keyed(kind, weights=WEIGHTS))).keys(),
        *(made.values(), made.weights(), made.lengths(), made.stride()),
    ],
    "empty_like of variable strides": lambda kind: [
        (made := kind.KeyedJaggedTensor.empty_like(variable(kind))).stride_per_key_per_rank(),
        *(made.keys(), made.values(), made.weights_or_none(), made.variable_stride_per_key()),
    ],
    "empty_like on a device": lambda kind: [
        (made := kind.KeyedJaggedTensor.empty_like(variable(kind), torch.device("meta"))).keys(),
        *(made.values(), made.lengths(), made.stride_per_key()),
    ],
    "split": lambda kind: keyed(kind, weights=WEIGHTS).split([1, 1]),
    "split into one": lambda kind: keyed(kind).split([2]),
    "split of variable strides": lambda kind: variable(kind, weights=WEIGHTS).split([1, 1]),
    "split of a feature without examples": lambda kind: [
        (part.keys(), part.values(), part.lengths().numel(), part.stride(), part.stride_per_key())
        for segments in ([1, 2], [0, 2, 0, 1])
        for part in kind.KeyedJaggedTensor(
            ["a", "b", "c"], VALUES, lengths=LENGTHS, stride_per_key_per_rank=[[3], [0], [5]]
        ).split(segments)
    ],
    "split of none": lambda kind: [
        (part.keys(), part.values(), part.lengths().numel()) for part in keyed(kind).split([0, 2, 0])
    ],
    "split of all keeps inverse indices": lambda kind: [
        (batch := variable(kind, inverse_indices=INVERSE)).split([2]),
        batch.split([0, 2, 0])[1],
        batch.split([2])[0] is batch,
    ],
    "split of some drops inverse indices": lambda kind: [
        *variable(kind, inverse_indices=INVERSE).split([1, 1]),
        variable(kind, inverse_indices=INVERSE).permute([1, 0]),
    ],
    "split of a key twice": lambda kind: [
        [part, part.index_per_key()]
        for made in (keyed, variable)
        for segments in ([1, 2], [2, 1], [3], [1, 1, 1])
        for part in made(kind, weights=WEIGHTS).permute([0, 0, 1]).split(segments)
    ],
    "concat of a key twice": lambda kind: [
        [joined, joined.index_per_key()]
        for made in (keyed, variable)
        for batch in [made(kind).permute([1, 0, 1])]
        for joined in (
            kind.KeyedJaggedTensor.concat([batch]),
            kind.KeyedJaggedTensor.concat([renamed(kind, made(kind)), batch]),
        )
    ],
    "permute": lambda kind: keyed(kind, weights=WEIGHTS).permute([1, 0]),
    "permute with a tensor": lambda kind: keyed(kind).permute([1, 0], torch.tensor([1, 0], dtype=torch.int32)),
    "permute with duplicates": lambda kind: keyed(kind).permute([1, 0, 1]),
    "permute of variable strides": lambda kind: variable(kind, weights=WEIGHTS).permute([1, 0]),
    "permute of variable strides with duplicates": lambda kind: variable(kind).permute([1, 1, 0]),
    "no examples": lambda kind: kind.KeyedJaggedTensor(
        *(["a"], torch.empty(0)), lengths=torch.empty(0), stride_per_key_per_rank=[[]]
    ).stride(),
    "features without bags": lambda kind: [
        [part.values(), part.lengths(), part.offsets_or_none() is not None]
        for part in kind.KeyedJaggedTensor(["a", "b"], torch.empty(0), lengths=torch.empty(2, 0)).to_dict().values()
    ],
    "rows as values": lambda kind: kind.KeyedJaggedTensor.from_offsets_sync(
        ["a", "b"], VALUES.view(4, 2), torch.tensor([0, 1, 3, 3, 4])
    )["a"],
    "flatten_lengths": lambda kind: keyed(kind, lengths=LENGTHS.view(2, 4)).flatten_lengths(),
    "lengths in rows": lambda kind: keyed(kind, lengths=LENGTHS.view(2, 4)).permute([1, 0]),
    "concat": lambda kind: kind.KeyedJaggedTensor.concat(
        [keyed(kind), kind.KeyedJaggedTensor(["c"], VALUES, lengths=LENGTHS[4:] + LENGTHS[:4])]
    ),
    "concat knows what its batches know": lambda kind: [
        kind.KeyedJaggedTensor.concat(parts).length_per_key_or_none()
        for made in (keyed, variable)
        for parts in ([made(kind)], made(kind).sync().split([1, 1]), [made(kind).sync(), renamed(kind, made(kind))])
    ],
    "concat of variable strides": lambda kind: kind.KeyedJaggedTensor.concat(
        [
            variable(kind, inverse_indices=INVERSE),
            kind.KeyedJaggedTensor(
                *(["c"], VALUES),
                lengths=torch.tensor([8]),
                stride_per_key_per_rank=[[1]],
                inverse_indices=(["c"], torch.zeros(1, 5, dtype=torch.int64)),
            ),
        ]
    ),
    "from_jt_dict": lambda kind: kind.KeyedJaggedTensor.from_jt_dict(keyed(kind, weights=WEIGHTS).to_dict()),
    "from_jt_dict of equal strides": lambda kind: kind.KeyedJaggedTensor.from_jt_dict(
        keyed(kind, stride_per_key_per_rank=[[4], [4]]).to_dict()
    ).variable_stride_per_key(),
    "from_jt_dict of variable strides": lambda kind: kind.KeyedJaggedTensor.from_jt_dict(variable(kind).to_dict()),
    "modules to features and back": lambda kind: kind.ComputeJTDictToKJT()(kind.ComputeKJTToJTDict()(keyed(kind))),
    "to": lambda kind: variable(kind, weights=WEIGHTS, inverse_indices=INVERSE).to(torch.device("cpu"), True),
    "to of a type": lambda kind: keyed(kind, weights=WEIGHTS).to(torch.device("cpu"), dtype=torch.float64),
    "copy_": lambda kind: keyed(kind, weights=torch.zeros(8)).copy_(variable(kind, weights=WEIGHTS)),
    "size_in_bytes": lambda kind: [each(kind, weights=WEIGHTS).size_in_bytes() for each in (keyed, variable)],
    "clear_storage": lambda kind: kind.KeyedJaggedTensor(
        ["a"], VALUES.clone(), lengths=torch.tensor([8])
    ).clear_storage(),
    "meta": lambda kind: [
        (made := keyed(kind).to(torch.device("meta"))).length_per_key(),
        *(made.offset_per_key(), made.stride(), made["a"].values()),
        kind.KeyedJaggedTensor.from_jt_dict(made.unsync().to_dict()).keys(),
    ],
    "str": lambda kind: str(keyed(kind)),
    "str with weights": lambda kind: str(keyed(kind, weights=WEIGHTS)),
    "str of variable strides": lambda kind: str(variable(kind, weights=WEIGHTS)),
    "str of none": lambda kind: [
        *(str(kind.KeyedJaggedTensor.empty()), str(kind.KeyedJaggedTensor([], torch.empty(0)))),
        *(str(kind.KeyedJaggedTensor.empty_like(made(kind, weights=WEIGHTS))) for made in (keyed, variable)),
    ],
    "equal": lambda kind: kind.kjt_is_equal(keyed(kind), kind.KeyedJaggedTensor(["a", "b"], VALUES, offsets=OFFSETS)),
    "not equal": lambda kind: [
        kind.kjt_is_equal(keyed(kind), other)
        for other in (keyed(kind, weights=WEIGHTS), keyed(kind).permute([1, 0]), keyed(kind).split([1, 1])[0], 1)
    ],
    "equal by what they are told of keys": lambda kind: [
        kind.kjt_is_equal(keyed(kind).sync(), told_other_sizes(keyed(kind), sizes)) for sizes in ([4, 4], [3, 5])
    ],
    "pytree": lambda kind: pytree.tree_map(lambda each: each, keyed(kind, weights=WEIGHTS)),
    "pytree of variable strides": lambda kind: pytree.tree_map(
        lambda each: each, variable(kind, inverse_indices=INVERSE)
    ),
    "dist_labels": lambda kind: [
        each(kind, weights=weights).dist_labels() for each in (keyed, variable) for weights in (None, WEIGHTS)
    ],
    "dist_splits": lambda kind: [
        each(kind, weights=weights).dist_splits([1, 1]) for each in (keyed, variable) for weights in (None, WEIGHTS)
    ],
    "dist_tensors": lambda kind: [
        each(kind, weights=weights).dist_tensors() for each in (keyed, variable) for weights in (None, WEIGHTS)
    ],
    "dist_init": lambda kind: kind.KeyedJaggedTensor.dist_init(
        ["a", "b"], [LENGTHS, VALUES, WEIGHTS], False, 2, torch.tensor([0, 2, 1, 3], dtype=torch.int32), [2, 2]
    ),
    "dist_init of ranks with other strides": lambda kind: kind.KeyedJaggedTensor.dist_init(
        *(["a", "b"], [LENGTHS, VALUES, WEIGHTS], False, 2),
        torch.tensor([0, 2, 3, 4, 1, 5, 6, 7], dtype=torch.int32),
        [1, 3],
    ),
    "dist_init of one rank": lambda kind: kind.KeyedJaggedTensor.dist_init(
        ["a", "b"], [LENGTHS, VALUES], False, 1, None, [4]
    ),
    "dist_init of variable strides": lambda kind: kind.KeyedJaggedTensor.dist_init(
        *(["a", "b"], [LENGTHS, VALUES, torch.tensor([2, 1, 3, 2]), WEIGHTS], True, 2),
        torch.tensor([0, 2, 1, 3], dtype=torch.int32),
        None,
    ),
}


def columns(kind: Any, keys: tuple[str, ...] = ("a", "b")) -> Any:
    parts = [torch.arange(6.0).view(3, 2), torch.arange(3.0).view(3, 1)]
    return kind.KeyedTensor.from_tensor_list(list(keys), parts)


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "from_tensor_list": columns,
    "along another dimension": lambda kind: kind.KeyedTensor.from_tensor_list(
        ["a", "b"], [torch.ones(2, 3), torch.zeros(1, 3)], 0, 0
    )["b"],
    "to_dict": lambda kind: columns(kind).to_dict(),
    "offset_per_key": lambda kind: columns(kind).offset_per_key(),
    "regroup": lambda kind: kind.KeyedTensor.regroup([columns(kind), columns(kind, ("c", "d"))], [["d", "a"], ["c"]]),
    "regroup of a part twice": lambda kind: kind.KeyedTensor.regroup([columns(kind)], [["a", "b"], ["a"]]),
    "regroup_as_dict": lambda kind: kind.KeyedTensor.regroup_as_dict([columns(kind)], [["b"], ["a"]], ["x", "y"]),
    "size_in_bytes": lambda kind: columns(kind).size_in_bytes(),
    "to": lambda kind: columns(kind).to(torch.device("cpu")),
    "str": lambda kind: str(columns(kind)),
    "str of none": lambda kind: str(kind.KeyedTensor([], [], torch.empty(0, 0))),
    "pytree": lambda kind: pytree.tree_map(lambda each: each, columns(kind)),
}


@pytest.mark.parametrize("case", JAGGED)
def test_a_jagged_tensor_gives_what_torchrecs_does(case: str) -> None:
    assert_alike(JAGGED[case])


@pytest.mark.parametrize("case", KEYED)
def test_a_keyed_jagged_tensor_gives_what_torchrecs_does(case: str) -> None:
    assert_alike(KEYED[case])


@pytest.mark.parametrize("case", COLUMNS)
def test_a_keyed_tensor_gives_what_torchrecs_does(case: str) -> None:
    assert_alike(COLUMNS[case])


class OfFeatures(torch.nn.Module):
    """What a graph does with a batch that it is given."""

    def forward(self, features: Any) -> list[Tensor]:
        first = features["a"]
        return [first.values(), first.lengths(), features.values() * 2, features.offsets()]


def made_of_tensors(kind: Any) -> torch.nn.Module:
    class Making(torch.nn.Module):
        def forward(self, values: Tensor, lengths: Tensor) -> Any:
            made = kind.KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
            joined = kind.KeyedJaggedTensor.concat([made, kind.KeyedJaggedTensor(["c"], values, lengths=lengths[:4])])
            feature = kind.JaggedTensor(values, lengths=lengths)
            return made, feature.to_dense(), joined.keys()

    return Making()


class Emptied(torch.nn.Module):
    """What is left of a batch that is given, joined with another."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind.KeyedJaggedTensor

    def forward(self, features: Any, others: Any) -> Any:
        like = self.kind.empty_like(features)
        joined = self.kind.concat([features, others])
        return like.weights(), like.stride(), joined.keys(), joined.length_per_key()


def test_symbolic_tracing_goes_through_batches_as_through_torchrecs() -> None:
    assert_alike(
        lambda kind: symbolic_trace(Emptied(kind))((batch := keyed(kind, weights=WEIGHTS).sync()), renamed(kind, batch))
    )
    assert_alike(lambda kind: symbolic_trace(OfFeatures())(keyed(kind)))
    assert_alike(lambda kind: len(symbolic_trace(made_of_tensors(kind)).graph.nodes))


def of_torch_script(kind: Any) -> Any:
    """A program that makes batches and takes them apart."""
    batch, feature = kind.KeyedJaggedTensor, kind.JaggedTensor

    def program(values: Tensor, lengths: Tensor) -> Any:
        made = batch.from_lengths_sync(["a", "b"], values, lengths)
        parts = made.split([1, 0, 1])
        like, none, bags = batch.empty_like(made), batch.empty(True), feature.empty()
        told = (parts[0].keys(), parts[1].stride(), like.keys(), like.stride(), made.length_per_key())
        return parts[2].values(), like.values(), none.weights(), bags.to_dense(), made["b"].to_dense(), told

    return torch.jit.script(program)


def test_torch_script_compiles_batches_as_torchrecs() -> None:
    assert_alike(lambda kind: of_torch_script(kind)(VALUES, LENGTHS))
    assert_alike(lambda kind: of_torch_script(kind)(VALUES, LENGTHS.long()))


def test_a_trace_takes_batches_of_other_sizes_as_torchrecs() -> None:
    class OffsetsOfA(torch.nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.make = kind.KeyedJaggedTensor.from_offsets_sync

        def forward(self, offsets: Tensor, values: Tensor) -> Tensor:
            return self.make(keys=["a", "b"], values=values, offsets=offsets)["a"].offsets()

    small = (torch.tensor([0, 1, 3]), VALUES[:3])

    def traced(kind: Any) -> Any:
        return torch.jit.trace(OffsetsOfA(kind), small, strict=False)

    assert_alike(lambda kind: traced(kind)(OFFSETS.long(), VALUES))


def bag_tables(prefix: str, **more: Any) -> list[Any]:
    make = torchrec_configs.EmbeddingBagConfig
    return [
        make(num_embeddings=10, embedding_dim=4, name=f"{prefix} 0", feature_names=["a"], **more),
        make(num_embeddings=10, embedding_dim=4, name=f"{prefix} 1", feature_names=["b", "a"], **more),
    ]


def row_tables(prefix: str) -> list[Any]:
    make = torchrec_configs.EmbeddingConfig
    return [make(num_embeddings=10, embedding_dim=4, name=f"{prefix} {name}", feature_names=[name]) for name in "ab"]


def ids(kind: Any, **more: Any) -> Any:
    return kind.KeyedJaggedTensor(["a", "b"], VALUES.long(), **{"lengths": LENGTHS, **more})


BATCHES: dict[str, Callable[[Any], Any]] = {
    "plain": ids,
    "weights": lambda kind: ids(kind, weights=WEIGHTS),
    "variable strides": lambda kind: ids(kind, stride_per_key_per_rank=STRIDES, inverse_indices=INVERSE),
    "inverse indices": lambda kind: ids(kind, inverse_indices=(["b", "a"], torch.tensor([[0, 3], [2, 1]]))),
}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_bags_pool_what_torchrecs_do(batch: str, is_weighted: bool, request: pytest.FixtureRequest) -> None:
    if is_weighted and batch != "weights":
        pytest.skip("a batch without weights")
    tables = bag_tables(request.node.name)
    other = EmbeddingBagCollection(tables, is_weighted=is_weighted)
    ours = RecStoreEmbeddingBagCollection(tables, keyed_output=True, is_weighted=is_weighted)
    import_torchrec(other.state_dict(), ours)
    expected = other(BATCHES[batch](theirs))
    for kind in (sparse, theirs):
        output = ours(BATCHES[batch](kind))
        assert type(output).__module__.split(".")[0] == ("torchrec" if kind is theirs else "recstore_ops")
        assert output.keys() == expected.keys()
        torch.testing.assert_close(output.values(), expected.values())
    assert ours.is_weighted() == other.is_weighted()


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("batch", ["plain", "variable strides"])
def test_rows_are_those_of_torchrecs(batch: str, need_indices: bool, request: pytest.FixtureRequest) -> None:
    tables = row_tables(request.node.name)
    other = EmbeddingCollection(tables, need_indices=need_indices)
    ours = RecStoreEmbeddingCollection(tables, need_indices=need_indices)
    import_torchrec(other.state_dict(), ours)
    expected = other(BATCHES[batch](theirs))
    for kind in (sparse, theirs):
        assert plain(ours(BATCHES[batch](kind))) == plain(expected)
    assert ours.need_indices() == other.need_indices()
    assert ours.embedding_dim() == other.embedding_dim()
    assert ours.embedding_names_by_table() == other.embedding_names_by_table()


def pooled(output: Any) -> Any:
    return [output.keys(), output.length_per_key(), plain(output.values())]


@pytest.mark.parametrize(("pooling", "is_weighted"), [("SUM", False), ("SUM", True), ("MEAN", False)])
def test_graphs_and_programs_of_bags_give_what_torchrecs_do(
    pooling: str, is_weighted: bool, request: pytest.FixtureRequest
) -> None:
    tables = bag_tables(request.node.name, pooling=torchrec_configs.PoolingType[pooling])
    other = EmbeddingBagCollection(tables, is_weighted=is_weighted)
    ours = RecStoreEmbeddingBagCollection(tables, keyed_output=True, is_weighted=is_weighted)
    import_torchrec(other.state_dict(), ours)
    make = BATCHES["weights" if is_weighted else "plain"]
    expected = torchrec_trace(other)(make(theirs))
    for trace in (symbolic_trace, torchrec_trace):
        graph: Any = trace(ours)
        for kind in (sparse, theirs):
            torch.testing.assert_close(graph(make(kind)).values(), expected.values())
        with torch.no_grad():
            for program in (torch.jit.script(graph), torch.jit.script(ours)):
                assert pooled(program(make(sparse))) == pooled(ours(make(sparse)))


@pytest.mark.parametrize("need_indices", [False, True])
def test_graphs_and_programs_of_rows_give_what_torchrecs_do(need_indices: bool, request: pytest.FixtureRequest) -> None:
    tables = row_tables(request.node.name)
    other = EmbeddingCollection(tables, need_indices=need_indices)
    ours = RecStoreEmbeddingCollection(tables, need_indices=need_indices)
    import_torchrec(other.state_dict(), ours)
    expected = plain(torchrec_trace(other)(ids(theirs)))
    for trace in (symbolic_trace, torchrec_trace):
        graph: Any = trace(ours)
        assert plain(graph(ids(sparse))) == plain(graph(ids(theirs))) == expected
        with torch.no_grad():
            for program in (torch.jit.script(graph), torch.jit.script(ours)):
                assert plain(program(ids(sparse))) == expected


def test_states_go_both_ways(request: pytest.FixtureRequest) -> None:
    for make, tables, open_ours in (
        (EmbeddingBagCollection, bag_tables(f"{request.node.name} bags"), RecStoreEmbeddingBagCollection),
        (EmbeddingCollection, row_tables(request.node.name), RecStoreEmbeddingCollection),
    ):
        first, second, ours = make(tables), make(tables), open_ours(tables)
        import_torchrec(first.state_dict(), ours)
        second.load_state_dict(export_torchrec(ours))
        assert plain(second.state_dict()) == plain(first.state_dict())


def test_a_table_starts_with_its_own_init_fn(request: pytest.FixtureRequest) -> None:
    tables = bag_tables(request.node.name, init_fn=lambda rows: torch.nn.init.constant_(rows, 3.0))
    other, ours = EmbeddingBagCollection(tables), RecStoreEmbeddingBagCollection(tables)
    assert plain(export_torchrec(ours)) == plain(dict(other.state_dict()))


def test_a_device_is_that_of_the_module(request: pytest.FixtureRequest) -> None:
    device = torch.device("meta")
    other = EmbeddingBagCollection(bag_tables(request.node.name), device=device)
    ours = RecStoreEmbeddingBagCollection(bag_tables(request.node.name), device=device)
    assert ours.device == other.device == device
    name = f"{request.node.name} 0"
    assert ours.embedding_bags[name].weight.device == other.embedding_bags[name].weight.device == device
    with device:
        assert RecStoreEmbeddingBagCollection(bag_tables(f"{request.node.name} around")).device == device
    rows = row_tables(request.node.name)
    devices = [
        made.embeddings[rows[0].name].weight.device
        for made in (RecStoreEmbeddingCollection(rows), EmbeddingCollection(rows))
    ]
    assert devices == [torch.device("cpu")] * 2


def test_a_table_twice_is_refused_as_torchrec_refuses_it() -> None:
    for tables, makes in (
        (bag_tables("twice"), (EmbeddingBagCollection, RecStoreEmbeddingBagCollection)),
        (row_tables("rows twice"), (EmbeddingCollection, RecStoreEmbeddingCollection)),
    ):
        for make in makes:
            with pytest.raises(ValueError, match="name"):
                make([tables[0]] * 2)
