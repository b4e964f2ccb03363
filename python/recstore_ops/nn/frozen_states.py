"""Frozen tables in `get_model_state_dict(options=StateDictOptions(ignore_frozen_params=True))`, which leaves them out.

Torch asks each parameter of the model whether it is frozen, and takes the key of its name from the state. A table has
other keys there, and is asked in the same way.
"""

from __future__ import annotations

from types import FrameType

from recstore_ops.state.keys import keys_of


def leave_out_of_state(frame: FrameType) -> bool:
    """Takes a frozen table from the state that the caller of its parameter makes, and returns whether there is one.

    Args:
        frame: the call that asks whether the parameter is frozen.
    """
    # Private in torch: a function of another name would find no key and raise an error, as for any other parameter.
    module = frame.f_globals.get("__name__")
    if frame.f_code.co_name != "_get_model_state_dict" or module != "torch.distributed.checkpoint.state_dict":
        return False
    asking = frame.f_locals
    state, prefixes = asking["state_dict"], ("", *asking["info"].submodule_prefixes)
    for name in frame.f_globals["_get_fqns"](asking["model"], asking["key"]):
        for prefix in prefixes:
            for key in keys_of(name.removesuffix("weight").removeprefix(prefix)):
                state.pop(key, None)
    return True
