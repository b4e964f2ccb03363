"""The examples that answer with a bundle without Python: built once, and asked with tensors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import graph_programs
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
        runners: those that answer with many bundles in one process, see `graph_programs`.
    """

    def __init__(self) -> None:
        folder = _made("runtime-examples") / "debug"
        self.programs = {"Rust": folder / "examples" / "predict", "C++": folder / "predict_cpp"}
        self.runners = {"rust": folder / "examples" / "run_programs", "cpp": folder / "run_programs_cpp"}

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

    def answers(
        self, language: str, programs: Sequence[Path], *, operators: Sequence[str] = (), under: Sequence[str] = ()
    ) -> list[graph_programs.Answer]:
        """What a runner answers to programs that may call these operators too, under a command that watches it."""
        command = [*under, str(self.runners[language])]
        return graph_programs.answers(command, language, programs, operators, env=_environment())

    def sanitized_answers(self, programs: Sequence[Path]) -> list[graph_programs.Answer]:
        """What the runner in Rust answers while AddressSanitizer watches the runtime."""
        runner = _made("runtime-sanitized") / "sanitized" / "run_programs"
        # What libtorch keeps until the process ends is no leak.
        environment = _environment() | {"ASAN_OPTIONS": "detect_leaks=0"}
        return graph_programs.answers([str(runner)], "rust", programs, env=environment)

    def run(self, language: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
        """Runs a program with as many threads as this process has."""
        command = [str(self.programs[language]), *map(str, arguments)]
        return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=120, check=False)


def _made(target: str) -> Path:
    """Makes a target of the Makefile and returns the folder of what was built."""
    built = subprocess.run(["make", "--silent", target], cwd=_ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return Path(os.environ.get("CARGO_TARGET_DIR", _ROOT / "target"))


def _environment() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(_LIBRARIES), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def _read(file: Path, dtype: str) -> Tensor:
    return torch.from_numpy(np.fromfile(file, np.uint8)).view(getattr(torch, dtype))
