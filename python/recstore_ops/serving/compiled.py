"""Programs compiled by AOTInductor: machine code for one release of torch and one kind of processor.

The handles of tables become buffers of the compiled program, so that they have names by which others take their place.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.utils._pytree import tree_leaves, tree_unflatten, treespec_loads

from recstore_ops.serving.frozen_table import FrozenMemory
from recstore_ops.serving.graph import Run
from recstore_ops.serving.manifest import COMPILED, Manifest
from recstore_ops.serving.opening import BundleFiles

_LEVELS = ("DEFAULT", "AVX2", "AVX512")
"""Instruction sets of x86 processors, in rising order: each includes those before it."""


def processor() -> str:
    """Returns what kind of processor this machine has, as machine code needs to know it."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def with_named_handles(program: ExportedProgram, handles: Collection[str]) -> ExportedProgram:
    """Returns a program with the handles of tables as buffers. All else is shared with the given program.

    Args:
        program: with example inputs.
        handles: the names of its constants that hold them.
    """
    signature = program.graph_signature
    inputs = [
        replace(spec, kind=InputKind.BUFFER, persistent=True) if spec.target in handles else spec
        for spec in signature.input_specs
    ]
    constants = {name: value for name, value in program.constants.items() if name not in handles}
    held = ((name, program.constants.get(name)) for name in handles)
    buffers = {name: value for name, value in held if isinstance(value, Tensor)}
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(inputs, signature.output_specs),
        state_dict={**program.state_dict, **buffers},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=constants,
    )


def write_compiled(program: ExportedProgram, path: Path) -> None:
    """Compiles a program with example inputs, which takes a compiler of C++ and some seconds.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Of torch's own calls.
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:
        raise RuntimeError(f"AOTInductor could not compile the program: {error}") from error


def check_fits(files: BundleFiles) -> None:
    """Checks that a bundle has a compiled program for this process.

    Raises:
        ValueError: it has none, or one for another release of torch or another kind of processor.
    """
    path, manifest = files.path, files.manifest
    if manifest.compiled_for is None:
        raise ValueError(f"{path} has no compiled program: export it with compiled=True")
    if manifest.torch != torch.__version__:
        raise ValueError(f"{path} was compiled for torch {manifest.torch}, this is {torch.__version__}")
    if not _runs_on(manifest.compiled_for, processor()):
        raise ValueError(f"{path} was compiled for {manifest.compiled_for}, this machine has {processor()}")
    if COMPILED not in manifest.files:
        raise ValueError(f"{path} has no {COMPILED}")


class CompiledModel:
    """A program that is run as machine code.

    Raises:
        OSError: its file was changed, or reads other tables.
    """

    def __init__(self, files: BundleFiles, memory: FrozenMemory) -> None:
        self.tables = files.tables(memory)
        with files.compiled() as path:
            self._loaded = torch._inductor.aoti_load_package(str(path))
        given, returned = self._loaded.loader.get_call_spec()
        self.in_spec, self.out_spec = treespec_loads(given), treespec_loads(returned)
        # A handle belongs to one process. The file has those of the process that exported.
        self._loaded.load_constants(self._handles(files.path, files.manifest), check_full_update=False)

    def _handles(self, path: Path, manifest: Manifest) -> dict[str, Tensor]:
        """The handles by their names in the compiled program, which has one name for constants that are equal."""
        held, found = set(self._loaded.get_constant_fqns()), {}
        for bundled in manifest.tables:
            if not (names := held.intersection(bundled.constants)):
                raise OSError(f"{path / COMPILED} reads no table {bundled.name!r}")
            found.update(dict.fromkeys(names, self.tables[bundled.name].handle))
        return found

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """See `Model`."""
        args, kwargs = tree_unflatten(inputs, self.in_spec)
        return tree_leaves(self._loaded(*args, **kwargs))

    def unchanged(self) -> AbstractContextManager[Run]:
        """See `Model`."""
        return nullcontext(self.run)


def _runs_on(compiled_for: str, here: str) -> bool:
    (machine, _, level), (own_machine, _, own_level) = compiled_for.partition(" "), here.partition(" ")
    if machine != own_machine:
        return False
    if level in _LEVELS and own_level in _LEVELS:
        return _LEVELS.index(level) <= _LEVELS.index(own_level)
    return level == own_level
