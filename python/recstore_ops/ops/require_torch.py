"""Imports torch before the native module, which links it, and says in one sentence what is missing."""

import re

OLDEST = (2, 11)

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "recstore_ops needs PyTorch 2.11 or newer, which is not installed: run `pip install torch`."
    ) from error

_version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
if _version < OLDEST:
    raise ImportError(
        f"recstore_ops needs PyTorch 2.11 or newer, and this is {torch.__version__}: run `pip install --upgrade torch`."
    )
