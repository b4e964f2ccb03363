"""Lookups in a region of `torch.utils.checkpoint` that is compiled.

Such a graph runs again, in its backward pass, what the region's policy does not keep. Torch cannot do so with an
operator that has an effect: the graph fails when it runs. So what these give is kept, whatever the policy. In eager
mode they run again.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

_NAMESPACES = ("recstore", "recstore_python")


def keep_in_checkpoints() -> None:
    """Lets the region that is traced, if any, keep the operators of this package; called while one is traced.

    The region's policy is in the mode whose method calls the operator. Torch hides a mode while its method runs, so it
    is found among the callers.
    """
    if "recompute" not in traceback.get_current_meta():
        return
    frame = inspect.currentframe()
    while frame is not None:
        mode: Any = frame.f_locals.get("self")
        if isinstance(mode, checkpoint._CachingTorchDispatchMode):
            if not isinstance(mode.policy_fn, _Keeping):
                mode.policy_fn = _Keeping(mode.policy_fn)
            return
        frame = frame.f_back


class _Keeping:
    """A policy that keeps the operators of this package, and is another one for the rest."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(operator, "namespace", None) in _NAMESPACES:
            return CheckpointPolicy.MUST_SAVE
        return self._policy(context, operator, *args, **kwargs)
