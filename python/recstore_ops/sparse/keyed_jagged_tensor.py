"""`KeyedJaggedTensor`: the sparse features of a batch, a bag of ids for each feature and example.

Shape suffixes: F features, B examples, N ids of all features. TorchScript compiles the class except what it inherits,
so it is written in the part of Python that TorchScript understands: within methods it is made with all arguments.
"""

import torch
import torch.fx
from torch import Tensor

from recstore_ops.sparse._bags import bounds_of, check_cover, check_values, lengths_of, may_keep, offsets_of
from recstore_ops.sparse.distribution import arrived_of_equal_features, arrived_of_variable_batch
from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.key_checks import accept_batch, check_keys, check_places, last_places, places_of_joined
from recstore_ops.sparse.keyed_batch import KeyedBatch
from recstore_ops.sparse.keyed_parts import (
    examples_of,
    joined_inverse_indices,
    joined_weights,
    reordered,
    reordered_strides,
    shared_out,
    strides_tensor,
    sums_over_ranks,
    taken_apart,
)
from recstore_ops.sparse.proxyable import Proxyable


class KeyedJaggedTensor(KeyedBatch, metaclass=Proxyable):
    """Bags of values, feature by feature: the bag of feature f and example b is number `f * B + b`.

    Features may have different numbers of examples; see `stride_per_key_per_rank`. Then the bags of a feature come
    behind all bags of the features before it.

    Args:
        keys: the names of the F features.
        values: `[N]`: the ids of all bags, one bag after the other.
        weights: `[N]`: a weight for each id.
        lengths: int32 or int64, `[F * B]` or `[F, B]`: the number of ids of each bag. Lengths or offsets must be given,
            unless there are no keys.
        offsets: int32 or int64, `[F * B + 1]`: the start of each bag, and the end of the last one.
        stride: the number of examples B; by default computed from the number of bags.
        stride_per_key_per_rank: the number of examples of each feature and of each rank that the batch comes from,
            `[F, R]`; one rank is `[[3], [1]]`.
        stride_per_key: the number of examples of each feature; this and all that follow except `inverse_indices` are
            computed by default.
        length_per_key: the number of ids of each feature.
        lengths_offset_per_key: the start of each feature's bags, and the end of the last one.
        offset_per_key: the start of each feature's ids, and the end of the last one.
        index_per_key: the place of each feature; with it a key may come twice.
        jt_dict: the features by name.
        inverse_indices: names of features, and for each of them and each of B examples the example among the feature's
            own that it stands for, `[F, B]`: for batches that hold equal bags once.

    Raises:
        TypeError: an argument of another type.
        ValueError: a key twice, shapes or numbers that do not fit together, or bags that do not lie within the values.

    Examples:
        Two features of three examples; the second example has no `item`:

        >>> features = KeyedJaggedTensor(
        ...     keys=["user", "item"],
        ...     values=torch.tensor([7, 8, 9, 1, 2, 3]),
        ...     lengths=torch.tensor([1, 1, 1, 2, 0, 1]),
        ... )
        >>> features["item"].to_dense()
        [tensor([1, 2]), tensor([], dtype=torch.int64), tensor([3])]
    """

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        self._keys = list(keys)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        self._stride_per_key_per_rank = strides_tensor(stride_per_key_per_rank)
        self._stride_per_key = stride_per_key
        self._length_per_key = length_per_key
        self._lengths_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict
        self._inverse_indices = inverse_indices
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            check_keys(keys)
            check_values(values, weights)
            accept_batch(self)

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """The constructor with offsets, and `sync`."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            None,
            offsets,
            stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """The constructor with lengths, and `sync`."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            None,
            stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Joins features. If they have different numbers of examples, the batch has variable strides.

        Raises:
            ValueError: no feature, or weights of some features only.
        """
        return _joined(jt_dict)

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Joins the features of batches of the same examples.

        Raises:
            ValueError: no batch, different numbers of examples, a key in two batches, or weights, variable strides or
                inverse indices in some batches only.
        """
        return _concat(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No features, of the types given; values and weights have torch's default type unless one is given."""
        # To TorchScript an empty list without a type is one of tensors.
        keys = torch.jit.annotate(list[str], [])
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return KeyedJaggedTensor(keys, values, weights, torch.empty(0, dtype=lengths_dtype, device=device), stride=0)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """No features, of the types and strides of another; with a device tensors of the same shapes, not filled."""
        return _empty_like(kjt, device)

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """Makes a batch of the tensors that ranks sent of the features that this one owns.

        Args:
            keys: the names of these features.
            tensors: `dist_tensors` of the ranks, each of them rank by rank.
            variable_stride_per_key: whether features have different numbers of examples.
            num_workers: the number of ranks.
            recat: the order that sorts the received parts by feature; by default they stay as they are.
            stride_per_rank: the examples of each rank, for features that have equally many.
            stagger: the number of ranks of a host, if the ranks of several hosts alternate; else 1.

        Raises:
            ValueError: another number of tensors, or no `stride_per_rank` although it is needed.
        """
        least = 3 if variable_stride_per_key else 2
        if not least <= len(tensors) <= least + 1:
            raise ValueError(f"expected {least} tensors, or {least + 1} with weights, got {len(tensors)}")
        if variable_stride_per_key:
            arrived = arrived_of_variable_batch(tensors, recat, len(keys), num_workers, stagger)
            stride = None
        else:
            if stride_per_rank is None:
                raise ValueError("stride_per_rank must be given where strides are not variable")
            arrived = arrived_of_equal_features(tensors, recat, stride_per_rank)
            stride = sum(stride_per_rank)
        return KeyedJaggedTensor(
            keys, arrived.values, arrived.weights, arrived.lengths, None, stride, arrived.strides_FR
        ).sync()

    def sync(self) -> "KeyedJaggedTensor":
        """Computes and caches the sizes of each feature, so that later calls wait for no device; a graph does not."""
        if may_keep():
            self.length_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forgets what `sync` computed."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def keys(self) -> list[str]:
        """The names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """The ids of all bags, `[N]`."""
        return self._values

    def weights(self) -> Tensor:
        """The weights of all ids, `[N]`.

        Raises:
            ValueError: there are none.
        """
        # A local variable, since TorchScript narrows the type of one by a check for None, and not that of an attribute.
        weights = self._weights
        if weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """The weights of all ids, `[N]`, if there are any."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of ids of each bag, `[F * B]`."""
        lengths = lengths_of(self._lengths, self._offsets)
        if may_keep():
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """The number of ids of each bag, if it was given or computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """The start of each bag, and the end of the last one, `[F * B + 1]`."""
        offsets = offsets_of(self._lengths, self._offsets)
        if may_keep():
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """The start of each bag, and the end of the last one, if they were given or computed."""
        return self._offsets

    def stride(self) -> int:
        """The number of examples B; of features with different ones those of the inverse indices, else the most."""
        stride = self._stride
        strides_FR = self._stride_per_key_per_rank
        if stride is not None:
            return stride
        if len(self._keys) == 0:
            return 0
        if strides_FR is not None:
            return examples_of(strides_FR, self._inverse_indices)
        return self._num_bags() // len(self._keys)

    def stride_per_key(self) -> list[int]:
        """The number of examples of each feature."""
        given = self._stride_per_key
        strides_FR = self._stride_per_key_per_rank
        if given is not None:
            return given
        if strides_FR is not None:
            return sums_over_ranks(strides_FR)
        return [self.stride()] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """The number of examples of each feature and rank, if features have different ones; else an empty list."""
        strides_FR = self._stride_per_key_per_rank
        if strides_FR is None:
            return torch.jit.annotate(list[list[int]], [])
        strides: list[list[int]] = strides_FR.to(torch.int64).tolist()
        return strides

    def variable_stride_per_key(self) -> bool:
        """Whether features may have different numbers of examples."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """The names of features, and the example among its own that each of the B examples stands for, `[F, B]`.

        Raises:
            ValueError: there are none.
        """
        inverse_indices = self._inverse_indices
        if inverse_indices is None:
            raise ValueError("this KeyedJaggedTensor has no inverse indices")
        return inverse_indices

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The inverse indices, if there are any."""
        return self._inverse_indices

    def index_per_key(self) -> dict[str, int]:
        """The place of each feature."""
        given = self._index_per_key
        if given is not None:
            return given
        return last_places(self._keys)

    def offset_per_key(self) -> list[int]:
        """The start of each feature's ids, and the end of the last one: F + 1 numbers."""
        given = self._offset_per_key
        lengths = self._length_per_key
        if given is not None:
            return given
        bounds = bounds_of(lengths) if lengths is not None else self._bounds()
        if may_keep():
            self._offset_per_key = bounds
        return bounds

    def offset_per_key_or_none(self) -> list[int] | None:
        """The start of each feature's ids, if it was given or computed."""
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """The number of ids of each feature: F numbers. On the meta device, which has no lengths, equal shares."""
        given = self._length_per_key
        if given is not None:
            return given
        bounds = self.offset_per_key()
        lengths = [bounds[index + 1] - bounds[index] for index in range(len(self._keys))]
        if may_keep():
            self._length_per_key = lengths
        return lengths

    def length_per_key_or_none(self) -> list[int] | None:
        """The number of ids of each feature, if it was given or computed."""
        return self._length_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """The start of each feature's bags, and the end of the last one: F + 1 numbers."""
        given = self._lengths_offset_per_key
        return given if given is not None else bounds_of(self.stride_per_key())

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Cuts the features into groups. A group of all features is this batch; others have no inverse indices.

        Args:
            segments: the number of features of each group, all F together.

        Raises:
            ValueError: segments that do not add up to F.
        """
        if sum(segments) != len(self._keys) or (len(segments) > 0 and min(segments) < 0):
            raise ValueError(f"segments must add up to {len(self._keys)} features, got {segments}")
        groups = torch.jit.annotate(list["KeyedJaggedTensor"], [])
        first = 0
        for segment in segments:
            # The batch itself keeps what it has computed, and its inverse indices.
            groups.append(self if segment == len(self._keys) else self._between(first, first + segment))
            first += segment
        return groups

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """Chooses features by their place, in the order given; one may come several times. Drops inverse indices.

        Args:
            indices: the places.
            indices_tensor: the same as a tensor, if the caller has it; checked.

        Raises:
            ValueError: a place that is out of range, or a tensor of others.
        """
        check_places(indices, indices_tensor, len(self._keys))
        lengths = self.length_per_key()
        weights = self._weights
        bounds = self.offset_per_key()
        keys = [self._keys[index] for index in indices]
        return self._made(
            keys,
            reordered(self._values, bounds, indices),
            None if weights is None else reordered(weights, bounds, indices),
            reordered(self.lengths().reshape(-1), self.lengths_offset_per_key(), indices),
            reordered_strides(self._stride_per_key_per_rank, indices),
            [lengths[index] for index in indices],
        )

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The same batch with lengths `[F * B]`, which may have been `[F, B]`, and without inverse indices."""
        return self._made(
            self._keys,
            self._values,
            self._weights,
            self.lengths().reshape(-1),
            self._stride_per_key_per_rank,
            self.length_per_key(),
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """The features by name.

        Args:
            compute_offsets: whether to compute the offsets of all features together, ahead of who asks for them.

        Raises:
            ValueError: there are values behind the last bag.
        """
        given = self._jt_dict
        if given is not None:
            return given
        bounds = self.lengths_offset_per_key()
        sizes = self.length_per_key()
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            check_cover(self._values.shape[0], sum(sizes))
        lengths = self.lengths().reshape(-1)
        features = taken_apart(self._keys, self._values, self._weights, lengths, sizes, bounds)
        if compute_offsets:
            for feature in features.values():
                feature.offsets()
        return features

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature.

        Raises:
            KeyError: there is no such feature.
        """
        places = self.index_per_key()
        if key not in places:
            raise KeyError(f'there is no feature "{key}" among {self._keys}')
        index = places[key]
        start, end = self.offset_per_key()[index], self.offset_per_key()[index + 1]
        bounds = self.lengths_offset_per_key()
        weights = self._weights
        return JaggedTensor(
            self._values[start:end],
            None if weights is None else weights[start:end],
            self.lengths().reshape(-1)[bounds[index] : bounds[index + 1]],
            None,
        )

    def _num_bags(self) -> int:
        lengths = self._lengths
        return lengths.numel() if lengths is not None else max(offsets_of(lengths, self._offsets).shape[0] - 1, 0)

    def _bounds(self) -> list[int]:
        """The start of each feature's ids, looked up in the offsets."""
        if len(self._keys) == 0:
            return [0]
        if self._values.is_meta:
            return bounds_of(shared_out(self._values.shape[0], len(self._keys)))
        offsets = self.offsets()
        if self._stride_per_key_per_rank is None and self._stride_per_key is None:
            places = torch.arange(len(self._keys) + 1, dtype=torch.int64, device=offsets.device) * self.stride()
        else:
            places = torch.tensor(self.lengths_offset_per_key(), dtype=torch.int64, device=offsets.device)
        bounds: list[int] = offsets[places].to(torch.int64).tolist()
        return bounds

    def _between(self, first: int, last: int) -> "KeyedJaggedTensor":
        """The features at the places from `first` to before `last`."""
        bounds = self.offset_per_key()
        bags = self.lengths_offset_per_key()
        strides_FR = self._stride_per_key_per_rank
        weights = self._weights
        return self._made(
            self._keys[first:last],
            self._values[bounds[first] : bounds[last]],
            None if weights is None else weights[bounds[first] : bounds[last]],
            self.lengths().reshape(-1)[bags[first] : bags[last]],
            None if strides_FR is None else strides_FR[first:last],
            self.length_per_key()[first:last],
        )

    def _made(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        strides_FR: Tensor | None,
        sizes: list[int],
    ) -> "KeyedJaggedTensor":
        """Features of this batch's examples; a key may come twice."""
        places = last_places(keys)
        # TorchScript wants every argument, and none by name.
        made = KeyedJaggedTensor(
            keys, values, weights, lengths, None, None, strides_FR, None, None, None, None, places, None, None
        )
        made._stride = self.stride()  # It and the sizes are known to be right.
        made._length_per_key = sizes
        return made


@torch.fx.wrap
def _joined(features: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    if len(features) == 0:
        raise ValueError("from_jt_dict needs at least one feature")
    sizes = [feature.lengths().shape[0] for feature in features.values()]
    stride = sizes[0] if min(sizes) == max(sizes) else None
    return KeyedJaggedTensor(
        list(features.keys()),
        torch.cat([feature.values() for feature in features.values()]),
        joined_weights([feature.weights_or_none() for feature in features.values()]),
        torch.cat([feature.lengths() for feature in features.values()]),
        stride=stride,
        stride_per_key_per_rank=None if stride is not None else [[size] for size in sizes],
    ).sync()


@torch.fx.wrap
def _concat(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if len(batches) == 0:
        raise ValueError("concat needs at least one KeyedJaggedTensor")
    are_variable = [batch.variable_stride_per_key() for batch in batches]
    if any(are_variable) != all(are_variable):
        raise ValueError("either all batches must have variable strides or none")
    strides = [batch.stride() for batch in batches]
    if not any(are_variable) and min(strides) != max(strides):
        raise ValueError(f"batches must have equally many examples, got {strides}")
    keys = torch.jit.annotate(list[str], [])
    strides_FR = torch.jit.annotate(list[Tensor], [])
    sizes = torch.jit.annotate(list[int], [])
    for batch in batches:
        keys += batch.keys()
        sizes_of = batch.length_per_key_or_none()
        if sizes_of is not None:
            sizes += sizes_of
        strides_of = batch._stride_per_key_per_rank
        if strides_of is not None:
            strides_FR.append(strides_of)
    joined = KeyedJaggedTensor(
        keys,
        torch.cat([batch.values() for batch in batches]),
        joined_weights([batch.weights_or_none() for batch in batches]),
        torch.cat([batch.lengths().reshape(-1) for batch in batches]),
        stride=None if any(are_variable) else strides[0],
        stride_per_key_per_rank=torch.cat(strides_FR) if any(are_variable) else None,
        inverse_indices=joined_inverse_indices([batch.inverse_indices_or_none() for batch in batches]),
        index_per_key=places_of_joined([batch.keys() for batch in batches]),
    )
    if len(sizes) == len(keys):
        joined._length_per_key = sizes
    return joined


@torch.fx.wrap
def _empty_like(batch: KeyedJaggedTensor, device: torch.device | None) -> KeyedJaggedTensor:
    if device is not None:
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            raise ValueError("in TorchScript empty_like takes no device")
        else:
            return batch._not_filled(device)
    weights = batch.weights_or_none()
    return KeyedJaggedTensor(
        torch.jit.annotate(list[str], []),
        batch.values().new_empty(0),
        None if weights is None else weights.new_empty(0),
        batch.lengths().new_empty(0),
        stride=None if batch.variable_stride_per_key() else batch.stride(),
        stride_per_key_per_rank=batch._stride_per_key_per_rank,
    )
