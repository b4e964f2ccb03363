"""Programs over every kind of module, saved in one process and run in another, which opens tables as it is told.

Run as a script, it does in one process what a test asks of it, and prints what each program gave at each moment.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from module_kinds import DIM, IDS, KINDS, NUM, OFFSETS
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
)
from recstore_ops.ops import operators

CASES = {f"kind{number}": kind for number, kind in enumerate(KINDS.values())}
"""The kinds of modules, by the names of tables and files."""


class OverTensors(nn.Module):
    """A module behind inputs that programs take: tensors."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns the rows or bags of ids, `[..., DIM]`."""
        if isinstance(self.module, RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection):
            lengths = torch.cat([offsets.diff(), ids.shape[0] - offsets[-1:]])
            out = self.module(KeyedJaggedTensor(["seen"], ids, lengths=lengths))
            return out["seen"].values() if isinstance(out, dict) else out
        return self.module(ids, offsets) if hasattr(self.module, "mode") else self.module(ids)


def export_strictly(model: nn.Module, path: Path) -> None:
    """Saves the program of `torch.export`, from bytecode."""
    torch.export.save(torch.export.export(model, (IDS, OFFSETS), strict=True), path)


def export(model: nn.Module, path: Path) -> None:
    """Saves the program of `torch.export`."""
    torch.export.save(torch.export.export(model, (IDS, OFFSETS)), path)


def trace(model: nn.Module, path: Path) -> None:
    """Saves the program of `torch.jit.trace`."""
    torch.jit.save(torch.jit.trace(model, (IDS, OFFSETS)), path)


SAVERS: dict[str, Callable[[nn.Module, Path], None]] = {
    "export": export,
    "strict": export_strictly,
    "trace": trace,
}

LOADERS: dict[str, Callable[[Path], Callable[..., Tensor]]] = {
    "export": lambda path: torch.export.load(path).module(),
    "strict": lambda path: torch.export.load(path).module(),
    "trace": torch.jit.load,
    "handle": lambda path: of_handle(torch.load(path)),
}


def of_handle(handle: Tensor) -> Callable[..., Tensor]:
    """What reads rows of the table of a handle."""
    return lambda ids, offsets: operators.emb_read(handle, ids, DIM)


def open_case(name: str) -> Any:
    """Opens the module of a case over the table `name`."""
    return CASES[name].open(name)


def fill(module: Any, value: float) -> None:
    """Writes all rows of a module's table."""
    operators.emb_write(module.tables()[0].handle, torch.arange(NUM), torch.full((NUM, DIM), value))


def save_all(directory: Path) -> None:
    """Saves programs and a handle of each case, whose tables hold sevens. Bytecode only of two, which takes longer."""
    for name in CASES:
        module = open_case(name)
        fill(module, 7.0)
        with torch.no_grad():
            for how, save in SAVERS.items():
                if how != "strict" or name in ("kind0", "kind3"):
                    save(OverTensors(module), directory / f"{name}.{how}.pt2")
        torch.save(module.tables()[0].handle, directory / f"{name}.handle.pt2")


class Programs:
    """The programs of a directory, each loaded as soon as that works."""

    def __init__(self, directory: Path) -> None:
        self._paths = {path.stem: path for path in sorted(directory.glob("*.pt2"))}
        self._loaded: dict[str, Callable[..., Tensor]] = {}

    def answers(self) -> dict[str, Any]:
        """What each gives now: the values that occur, or the error of loading or running it."""
        return {label: self._answer(label) for label in self._paths}

    def _answer(self, label: str) -> Any:
        try:
            if label not in self._loaded:
                self._loaded[label] = LOADERS[label.partition(".")[2]](self._paths[label])
            return [self._loaded[label](IDS, OFFSETS).unique().tolist() for _ in range(3)][-1]
        except Exception as error:
            return str(error).strip().splitlines()[-1]


def run_all(directory: Path) -> dict[str, Any]:
    """Runs the programs before and after tables are opened, dropped and made again."""
    programs = Programs(directory)
    told = {"fresh": programs.answers()}
    others = [DistEmbedding(NUM, DIM, f"other{number}") for number in range(len(CASES))]
    for other in others:
        fill(other, 100.0)
    told["others only"] = programs.answers()
    modules = {name: open_case(name) for name in reversed(CASES)}
    for module in modules.values():
        fill(module, 8.0)
    told["another order"] = programs.answers()
    for name in CASES:
        operators.drop_table(name)
    told["dropped"] = programs.answers()
    modules.clear()
    modules = {name: open_case(name) for name in CASES}
    for module in modules.values():
        fill(module, 9.0)
    told["made again"] = programs.answers()
    return told


class Interacting(nn.Module):
    """Two tables and a product, for a compiled graph with a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.user = DistEmbedding(NUM, DIM, "user", optimizer={"kind": "sgd", "lr": 1.0})
        self.item = DistEmbedding(NUM, DIM, "item", optimizer={"kind": "sgd", "lr": 1.0})

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the inner products of the rows of ids, `[N, N]`."""
        return torch.mm(self.user(ids), self.item(ids).T)


def compile_and_step(before: str) -> dict[str, Any]:
    """Trains a compiled model by a step, after `before` so many other tables were opened."""
    others = [DistEmbedding(NUM, DIM, f"other{number}") for number in range(int(before))]
    model = Interacting()
    fill(model.user, 2.0)
    fill(model.item, 3.0)
    compiled = torch.compile(model, fullgraph=True)
    ids = torch.tensor([1])
    out = compiled(ids)
    out.sum().backward()
    SparseOptimizer(modules=[model]).step()
    with torch.no_grad():
        rows = [module(ids).unique().tolist() for module in (model.user, model.item)]
    untouched = sum(len(other.table) for other in others)
    return {"out": out.tolist(), "rows": rows, "others": untouched}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    work = {"run_all": lambda directory: run_all(Path(directory)), "compile_and_step": compile_and_step}
    print(json.dumps(work[sys.argv[1]](sys.argv[2])))
