"""A bundle that answers requests of either protocol."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch import Tensor

from recstore_ops.serving.bundle import Bundle
from recstore_ops.serving.following.followed import FollowingBundle
from recstore_ops.serving.server.batching import Batcher, first_line
from recstore_ops.serving.server.metrics import Metrics
from recstore_ops.serving.server.refusals import Kind, Refusal, invalid, quoted
from recstore_ops.serving.server.settings import ModelServerSettings
from recstore_ops.serving.server.signature import Signature, TensorSpec
from recstore_ops.serving.server.tensors import InputTensor, tensors_of

_FIRST, _SECOND = 2, 3
_MIN_VARYING = 2


def reason_to_run_alone(signature: Signature, program: Callable[[Sequence[Tensor]], list[Tensor]]) -> str | None:
    """Returns why requests are not to be joined; None: two made-up requests gave the same joined and alone.

    Shapes say which dimensions are rows, not whether a row's output depends on the others, as with a softmax over the
    batch.
    """
    if signature.alone is not None:
        return signature.alone
    # A generator of its own: the program may draw torch's random numbers.
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


VERSION = "1"
PLATFORM = "recstore_bundle"
EXTENSIONS = ("binary_tensor_data",)

Answer = TypeVar("Answer")
Outputs = list[tuple[TensorSpec, Tensor]]


@dataclass(frozen=True)
class InferRequest:
    """A request for inference, as far as both protocols agree.

    Attributes:
        id: comes back with the answer; empty: none.
        inputs: as written.
        outputs: names of those that are wanted; empty: all.
    """

    id: str
    inputs: Sequence[InputTensor]
    outputs: Sequence[str]


class ModelServer:
    """A bundle, its queue and its figures.

    Args:
        bundle: what is served.
        name: by which requests name it.
        settings: limits and threads.

    Attributes:
        signature: inputs and outputs, and whether requests are joined.
        is_ready: whether health says so.
        is_ending: whether requests are refused.
        in_flight: requests for inference that are not yet answered.

    Raises:
        ValueError: the protocol cannot carry an input or output of the bundle.
    """

    def __init__(self, bundle: Bundle, name: str, settings: ModelServerSettings) -> None:
        self.name = name
        self.settings = settings
        self._bundle = bundle
        signature = Signature.of(bundle)
        # An update between these calls would look like rows that depend on each other.
        with bundle.at_one_step() as flat:
            self.signature = replace(signature, alone=_reason(signature, settings, flat))
        self.metrics = Metrics(name)
        self._batcher = Batcher(self._bundle.flat, self.signature.alone is None, settings, self.metrics)
        self.is_ready = True
        self.is_ending = False
        self.in_flight = 0
        self.metrics.gauges |= {
            "recstore_model_queued_requests": ("Requests that wait for a worker.", lambda: len(self._batcher)),
            "recstore_model_requests_in_flight": ("Requests not yet answered.", lambda: self.in_flight),
            **_of_following(bundle),
            "recstore_model_ready": ("1 while health says ready.", lambda: int(self.is_ready)),
        }

    def check_model(self, name: str, version: str) -> None:
        """Compares the model of a request, an empty version being the only one.

        Raises:
            Refusal: it is another.
        """
        if name != self.name:
            raise Refusal(Kind.UNKNOWN, f"there is no model {quoted(name)}, there is {self.name!r}")
        if version not in ("", VERSION):
            raise Refusal(Kind.UNKNOWN, f"model {self.name!r} has no version {quoted(version)}, it has {VERSION!r}")

    @property
    def server_metadata(self) -> dict[str, Any]:
        """The metadata of the server."""
        return {"name": "recstore", "version": version("recstore-ops"), "extensions": list(EXTENSIONS)}

    @property
    def model_metadata(self) -> dict[str, Any]:
        """The metadata of the model."""
        tensors = {
            key: [{"name": each.name, "datatype": each.datatype.name, "shape": each.public_shape} for each in specs]
            for key, specs in (("inputs", self.signature.inputs), ("outputs", self.signature.outputs))
        }
        return {"name": self.name, "versions": [VERSION], "platform": PLATFORM, **tensors}

    async def counted(self, protocol: str, answer: Callable[[], Awaitable[Answer]]) -> Answer:
        """Answers a request for inference and counts it.

        Raises:
            Refusal: it gets no answer.
        """
        begin = time.perf_counter()
        self.in_flight += 1
        # Stays so if the client has gone: CancelledError is no Exception, and no clause below sets another outcome.
        outcome = "cancelled"
        try:
            if self.is_ending:
                raise Refusal(Kind.ENDING, "the server ends")
            answered = await answer()
            outcome = "ok"
            return answered
        except Refusal as refusal:
            outcome = refusal.kind.label
            raise
        except Exception:
            outcome = Kind.FAILED.label
            traceback.print_exc(file=sys.stderr)
            raise Refusal(Kind.FAILED, "the server failed; its error stream says why") from None
        finally:
            self.in_flight -= 1
            self.metrics.requests[protocol, outcome] += 1
            self.metrics.seconds[protocol].observe(time.perf_counter() - begin)

    async def infer(self, request: InferRequest) -> Outputs:
        """Returns the outputs that a request wants, in its order.

        Raises:
            Refusal: it is wrong, the queue is full, or the program fails.
        """
        wanted = self._wanted(request.outputs)
        inputs = tensors_of(self.signature, request.inputs, self.settings.max_elements)
        outputs = await self._batcher.run(inputs)
        self.metrics.rows += inputs[0].shape[0] if inputs and inputs[0].dim() else 1
        return [(self.signature.outputs[place], outputs[place]) for place in wanted]

    async def answer_the_rest(self, seconds: float) -> int:
        """Refuses new requests, waits for those under way, and returns how many of them are left."""
        self.is_ending = True
        end = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._batcher.close()
        return self.in_flight

    def _wanted(self, names: Sequence[str]) -> list[int]:
        places = {spec.name: place for place, spec in enumerate(self.signature.outputs)}
        for number, name in enumerate(names):
            if name not in places:
                raise invalid(f"there is no output {quoted(name)}; the model gives {', '.join(places)}")
            if name in names[:number]:
                raise invalid(f"output {name!r} is asked for twice")
        return [places[name] for name in names or places]


def _reason(
    signature: Signature, settings: ModelServerSettings, program: Callable[[Sequence[Tensor]], list[Tensor]]
) -> str | None:
    if settings.max_batch == 1:
        return "--max-batch is 1"
    return reason_to_run_alone(signature, program)


def _of_following(bundle: Bundle) -> dict[str, tuple[str, Callable[[], float]]]:
    """The gauges of a bundle that follows a publication."""
    if not isinstance(bundle, FollowingBundle):
        return {}
    return {
        "recstore_model_step": ("The step of the trainer whose state answers.", lambda: bundle.step),
        "recstore_model_age_seconds": ("Time since the trainer was there.", lambda: bundle.age),
        "recstore_model_follows": (
            "1 while the publication can be read.",
            lambda: int(bundle.follower.follows),
        ),
    }
