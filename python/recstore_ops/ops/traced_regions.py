"""The places of a traced graph that may have no lookup: torch would crash there, or drop gradients without a word.

Torch keeps the order of the operators with an effect in a graph. The graphs within, of `torch.cond` and its like, lose
the order, or do not compile. `vmap` has no rule for such operators.
Compiled autograd drops them. Lists of what is known to work stand here; all else is refused.
"""

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SHAPE_OF_HANDLES, _MARK, _BITS_OF_LENGTH = (19,), 0x7273_6831, 32
"""The handle of a table: its number, the length of its name with a mark above, and the name."""

_WITH_LOOKUPS = frozenset({"tag_activation_checkpoint", "autograd.Function"})
"""Operators whose graphs within may have lookups: checkpoints, whose policy keeps them, and functions of autograd."""
_PUBLIC_NAMES = {
    "cond": "torch.cond",
    "invoke_subgraph": "torch.compiler.nested_compile_region",
    "map_impl": "map",
}

_DROPPED = (
    "compiled autograd collects no gradients of rows: run backward without torch._dynamo.config.compiled_autograd; the "
    "forward may be compiled"
)


def _while_traced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets the compiler call a function as it traces. `torch.compiler.assume_constant_result` would import it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_while_traced
def region_refusal(has_backward: bool) -> str:
    """Why the place that is traced may have no lookup, for `stop`; else "".

    Args:
        has_backward: whether the lookup leads to gradients.
    """
    # Else compiled autograd drops calls from the graph of an earlier backward before anything can refuse them.
    getattr(_compiled_autograd(), "_impure_targets", set()).add(torch.ops.higher_order.with_effects)
    if region := _region(has_backward):
        return f"torch takes no lookup within {region}: look up before {region} and give it the rows"
    # Python goes on with the lookup, and its function refuses before the pass is compiled.
    return _DROPPED if has_backward and _is_backward_compiled() else ""


@_while_traced
def transform_refusal() -> str:
    """As `region_refusal`, for a lookup whose parameter was replaced: a transform of `torch.func` does that."""
    if not (transforms := _transforms()):
        return ""
    return (
        f"torch.compile collects no gradients of rows within torch.func.{transforms[-1]}: leave {transforms[-1]} out "
        "of what is compiled, or differentiate the dense parameters alone"
    )


@_while_traced
def stop(table: str, refusal: str) -> None:
    """Ends a graph before a lookup. Python goes on from there, unless the compiler is to take all in one graph.

    The name of the table is asked for here alone: a graph that knows it serves no other table.

    Raises:
        RuntimeError: with the table and the refusal.
    """
    from torch._dynamo.exc import Unsupported

    sentence = f'table "{table}": {refusal}'
    # Where a graph ended at this very call, Python makes it again.
    raise RuntimeError(sentence) if _translator() is None else Unsupported(sentence)


def _is_backward_compiled() -> bool:
    return torch._dynamo.config.compiled_autograd or _compiled_autograd().compiled_autograd_enabled


def _translator() -> Any:
    """The translator that traces, if one does."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(tls, "current_tx", None)


def _compiled_autograd() -> Any:
    return sys.modules["torch._dynamo.compiled_autograd"]


def _region(has_backward: bool) -> str:
    """The region that is traced, if it may have no lookup; else ""."""
    from torch._higher_order_ops.utils import _hop_compile_tls

    translator = _translator()
    # Outside of the compiler `torch.cond` and its like trace a graph only to run it in Python.
    runs_in_python = not has_backward and getattr(_hop_compile_tls, "in_hop_compile", False)
    tracer: Any = None if translator is None or runs_in_python else translator.output.current_tracer
    while tracer is not None and tracer.parent is not None:
        operator = _name_of(tracer.source_target)
        if operator not in _WITH_LOOKUPS:
            return _PUBLIC_NAMES.get(operator, operator)
        tracer = tracer.parent
    return "vmap" if "vmap" in _transforms() else ""


def _transforms() -> list[str]:
    """The transforms under way, from the outermost."""
    stack = torch._C._functorch.get_interpreter_stack() or []  # type: ignore[attr-defined]
    return [interpreter.key().name.lower() for interpreter in stack]


def _name_of(operator: Any) -> str:
    return operator if isinstance(operator, str) else operator.name()


class CollectingFunction(Function):
    """A function of autograd whose `backward` collects gradients."""

    @staticmethod
    def named(ctx: Any) -> str:
        """The name of the table, or of one of several."""
        return next(filter(None, map(_name_in, [*ctx.saved_tensors, *getattr(ctx, "tables", ())])), "")

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        # Compiled autograd asks each function of a pass for this, before it compiles or runs any.
        raise RuntimeError(f'table "{ctx._forward_cls.named(ctx)}": {_DROPPED}')


def refuse_compiled_autograd(table: Tensor) -> None:
    """Refuses to collect gradients in a pass of compiled autograd, which would drop them.

    Args:
        table: a handle, or what stands for one in a graph that is traced.

    Raises:
        RuntimeError: such a pass is traced or run.
    """
    if "torch._dynamo" in sys.modules and _compiled_autograd().in_compiled_autograd_region:
        raise RuntimeError(f'table "{_name_in(_real(table))}": {_DROPPED}')


def _real(tensor: Tensor) -> Tensor | None:
    """The tensor that an argument of the traced graph stands for."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    translator = _translator()
    arguments = [] if translator is None else translator.output.graphargs
    return next((each.example for each in arguments if each.fake_tensor is tensor), None)


def _name_in(handle: Tensor | None) -> str:
    """The name that a tensor holds if it is the handle of a table; of a long name most."""
    if handle is None or handle.dtype != torch.int64 or handle.shape != _SHAPE_OF_HANDLES:
        return ""
    _, length, *words = handle.tolist()
    if length >> _BITS_OF_LENGTH != _MARK:
        return ""
    held = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return held[: length & (1 << _BITS_OF_LENGTH) - 1].decode(errors="replace")
