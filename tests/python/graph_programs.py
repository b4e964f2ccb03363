"""Programs as graphs written by hand, and what Python, Rust and C++ answer to them, many in one process.

PROGRAM/bundle     the bundle
PROGRAM/inputs/N   an input: the number of its type in C, how many sizes, these, each in eight bytes; then its elements
PROGRAM/rust/N     an output of the runtime in Rust, in the same form; of C++ in PROGRAM/cpp, of `load_bundle` in python

    python graph_programs.py LIST    answers to the programs of a list with `load_bundle`
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_flatten, treespec_dumps

from recstore_ops import load_bundle
from recstore_ops.serving.checked_json import checked_json
from recstore_ops.serving.manifest import GRAPH, NAME, STATE, sum_of

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""By their numbers in C."""


@dataclass(frozen=True)
class Table:
    """A frozen table.

    Attributes:
        file: where it is.
        name, fingerprint: as its bundle's manifest has them.
    """

    file: Path
    name: str
    fingerprint: int

    @classmethod
    def of(cls, bundle: Path) -> Table:
        """The first table of a bundle."""
        (table, *_) = json.loads((bundle / NAME).read_text())["tables"]
        return cls(bundle / table["file"], table["name"], table["fingerprint"])


@dataclass
class Program:
    """A graph with what it reads.

    Attributes:
        calls, outputs: as in the file; values are numbered: state, inputs, calls.
        state: by their names.
        inputs: what it is asked with.
        gives: an example of each output, of its type and shape.
        table: what the names of `handles` are the handle of.
        handles: names of the state.
    """

    calls: Sequence[Any]
    outputs: Sequence[int]
    inputs: Sequence[Tensor] = ()
    gives: Sequence[Tensor] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)
    table: Table | None = None
    handles: Sequence[str] = ()

    def write(self, folder: Path) -> Path:
        """Writes the program into a folder of its own and returns it."""
        for name in ("bundle/tables", "inputs", "rust", "cpp", "python"):
            (folder / name).mkdir(parents=True)
        bundle = folder / "bundle"
        (bundle / GRAPH).write_text(json.dumps(self._graph()))
        save_file(dict(self.state), bundle / STATE)
        tables = []
        if self.table is not None:
            shutil.copy(self.table.file, bundle / "tables/0.safetensors")
            tables.append(
                {
                    "name": self.table.name,
                    "file": "tables/0.safetensors",
                    "fingerprint": self.table.fingerprint,
                    "constants": list(self.handles),
                }
            )
        fields = {
            "torch": torch.__version__,
            "recstore_ops": "0",
            "files": {name: sum_of(bundle / name) for name in (GRAPH, STATE)},
            "tables": tables,
            "inputs": [_described(f"in{place}", value) for place, value in enumerate(self.inputs)],
            "outputs": [_described(f"out{place}", value) for place, value in enumerate(self.gives)],
            "compiled_for": None,
        }
        (bundle / NAME).write_text(checked_json(fields, "recstore bundle", 2))
        for place, value in enumerate(self.inputs):
            (folder / "inputs" / str(place)).write_bytes(stored(value))
        return folder

    def _graph(self) -> dict[str, Any]:
        arguments = (tuple(torch.zeros(()) for _ in self.inputs), {})
        return {
            "state": [*self.state, *self.handles],
            "inputs": len(self.inputs),
            "calls": self.calls,
            "outputs": [{"value": output} for output in self.outputs],
            "in_spec": treespec_dumps(tree_flatten(arguments)[1]),
            "out_spec": treespec_dumps(tree_flatten(tuple(self.outputs))[1]),
        }


def _described(name: str, value: Tensor) -> dict[str, Any]:
    shape = list(value.shape)
    return {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": shape,
        "sizes": [None] * len(shape),
    }


def stored(value: Tensor) -> bytes:
    """A tensor as a file."""
    whole = value.resolve_conj().resolve_neg().contiguous()
    head = struct.pack(f"<{2 + whole.dim()}q", DTYPES.index(whole.dtype), whole.dim(), *whole.shape)
    # A tensor of one element may have any stride, with which it has no bytes.
    elements = whole.reshape(-1).clone(memory_format=torch.contiguous_format)
    return head + elements.view(torch.uint8).numpy().tobytes()


def read_stored(file: bytes) -> Tensor:
    """The tensor of a file."""
    dtype, rank = struct.unpack_from("<2q", file)
    shape = struct.unpack_from(f"<{rank}q", file, 16)
    elements = torch.frombuffer(bytearray(file), dtype=torch.uint8)[16 + 8 * rank :].clone()
    return elements.view(DTYPES[dtype]).reshape(shape)


@dataclass(frozen=True)
class Answer:
    """What a program gave in one language.

    Attributes:
        refused: why it gave nothing; empty if it did.
        outputs: as files.
    """

    refused: str
    outputs: tuple[bytes, ...]


def answers(
    command: Sequence[str],
    language: str,
    programs: Sequence[Path],
    operators: Sequence[str] = (),
    **options: Any,
) -> list[Answer]:
    """What a command answers to programs that may call these operators beside those of the list.

    Raises:
        AssertionError: it ended before the last, or saw what must not be.
    """
    listed = programs[0].parent / f"{language}.list"
    listed.write_text("".join(f"{program}\n" for program in programs))
    options = {"capture_output": True, "text": True, "check": False, "timeout": 3000} | options
    ended = subprocess.run([*command, str(listed), *operators], **options)
    # Libraries of torch complain on stdout.
    lines = [line for line in ended.stdout.splitlines() if "\t" in line]
    last = [*lines, "the first"][len(lines) - 1 if lines else 0]
    assert ended.returncode == 0, f"{language} ended with {ended.returncode} after {last}\n{ended.stderr[-3000:]}"
    assert len(lines) == len(programs), ended.stdout[-3000:]
    return [_answer(program / language, *line.split("\t")) for program, line in zip(programs, lines, strict=True)]


def _answer(folder: Path, program: str, said: str) -> Answer:
    assert program == str(folder.parent)
    if said.startswith("refused: "):
        return Answer(said.removeprefix("refused: "), ())
    count = int(said.removeprefix("gave "))
    return Answer("", tuple((folder / str(place)).read_bytes() for place in range(count)))


def _answer_in_python(program: Path) -> str:
    try:
        bundle = load_bundle(program / "bundle")
        inputs = [
            read_stored((program / "inputs" / str(place)).read_bytes()) for place in range(len(bundle.manifest.inputs))
        ]
        outputs = bundle.flat(inputs)
        files = [stored(output) for output in outputs]
    except (ValueError, RuntimeError, OSError, IndexError, NotImplementedError, ArithmeticError) as error:
        return f"refused: {type(error).__name__} {error}".replace("\n", " ").replace("\t", " ")
    for place, file in enumerate(files):
        (program / "python" / str(place)).write_bytes(file)
    return f"gave {len(files)}"


if __name__ == "__main__":
    for each in Path(sys.argv[1]).read_text().splitlines():
        print(each, _answer_in_python(Path(each)), sep="\t", flush=True)
