"""Batches of sparse features, with the interface of TorchRec's types of the same names.

For models without TorchRec. The collections take TorchRec's own types as well.
"""

from recstore_ops.sparse.jagged_tensor import JaggedTensor
from recstore_ops.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recstore_ops.sparse.keyed_tensor import KeyedTensor
from recstore_ops.sparse.pytree import ComputeJTDictToKJT, ComputeKJTToJTDict, jt_is_equal, kjt_is_equal, register

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
]

register()
del register
