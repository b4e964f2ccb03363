"""A batch as its features by name, and back, as modules: for models whose parts are modules."""

from torch import nn

from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class ComputeKJTToJTDict(nn.Module):
    """Gives the features of a batch by name."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """`KeyedJaggedTensor.to_dict`."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """Joins features to a batch."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """`KeyedJaggedTensor.from_jt_dict`."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
