"""Whether rows of a model are apart from each other, tried out before requests are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recstore_ops.serving.server.batching import first_line
from recstore_ops.serving.server.signature import Signature, TensorSpec

_FIRST, _SECOND = 2, 3
_MIN_VARYING = 2


def reason_to_run_alone(signature: Signature, program: Callable[[Sequence[Tensor]], list[Tensor]]) -> str | None:
    """Returns why requests are not to be joined; None: two made-up requests gave the same joined and alone.

    Shapes say which dimensions are rows, not whether a row's output depends on the others, as with a softmax over the
    batch.
    """
    if signature.alone is not None:
        return signature.alone
    generator = torch.Generator().manual_seed(0)
    first, second = ([_made_up(spec, rows, generator) for spec in signature.inputs] for rows in (_FIRST, _SECOND))
    try:
        alone = [program(first), program(second)]
        joined = program([torch.cat(pair) for pair in zip(first, second, strict=True)])
    except Exception as error:
        return f"the model refuses made-up inputs: {first_line(error)}"
    for spec, output, *parts in zip(signature.outputs, joined, *alone, strict=True):
        if not _is_near(output, torch.cat(parts)):
            return f"rows of {spec.name} depend on the other rows of a batch"
    return None


def _made_up(spec: TensorSpec, rows: int, generator: torch.Generator) -> Tensor:
    """Returns rows of an input: zeros and ones, which are in the range of most ids, or numbers between them."""
    shape = (rows, *(size if isinstance(size, int) else _MIN_VARYING for size in spec.shape[1:]))
    values = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    return (values if spec.datatype.kind == "float" else values.round()).to(spec.datatype.dtype)


def _is_near(joined: Tensor, alone: Tensor) -> bool:
    if joined.shape != alone.shape:
        return False
    tolerance = 1e-2 if joined.dtype.itemsize == 2 else 1e-4
    return torch.allclose(joined.double(), alone.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
