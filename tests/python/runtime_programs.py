"""The examples that answer with a bundle without Python: built once, and asked with tensors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recstore_ops.serving.manifest import Manifest

# Built together with what tch links.
ONLY_TORCH = pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="tch is bound to torch 2.13.0")

_ROOT = Path(__file__).parents[2]
_LIBRARIES = Path(torch.__file__).parent / "lib"


class Answer(NamedTuple):
    """What a program gave: its exit code, what it told, and its tensors, flat; none if it failed."""

    code: int
    told: str
    tensors: list[Tensor]


class Runtime:
    """The programs.

    Attributes:
        programs: by their languages.
    """

    def __init__(self) -> None:
        built = subprocess.run(
            ["make", "--silent", "runtime-examples"], cwd=_ROOT, capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, built.stderr
        folder = Path(os.environ.get("CARGO_TARGET_DIR", _ROOT / "target")) / "debug"
        self.programs = {"Rust": folder / "examples" / "predict", "C++": folder / "predict_cpp"}

    def ask(self, language: str, bundle: Path, inputs: Sequence[Tensor], folder: Path) -> Answer:
        """Runs a program, with files in a folder of its own."""
        manifest = Manifest.read(bundle)
        given, taken = folder / language / "given", folder / language / "taken"
        for each in (given, taken):
            each.mkdir(parents=True, exist_ok=True)
        for described, value in zip(manifest.inputs, inputs, strict=True):
            (given / f"{described['name']}.bin").write_bytes(value.contiguous().view(torch.uint8).numpy().tobytes())
        ended = self.run(language, bundle, given, taken)
        outputs = [] if ended.returncode else manifest.outputs
        tensors = [_read(taken / f"{output['name']}.bin", output["dtype"]) for output in outputs]
        return Answer(ended.returncode, ended.stdout + ended.stderr, tensors)

    def run(self, language: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
        """Runs a program with as many threads as this process has."""
        environment = {"LD_LIBRARY_PATH": str(_LIBRARIES), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        command = [str(self.programs[language]), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def _read(file: Path, dtype: str) -> Tensor:
    return torch.from_numpy(np.fromfile(file, np.uint8)).view(getattr(torch, dtype))
