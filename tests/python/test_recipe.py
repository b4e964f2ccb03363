"""The recipe "A new optimizer" of CONTRIBUTING.md, done in a copy of the tree: its files make a rule."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
RULE = Path(__file__).parent / "recipes" / "adamax.rs"
NEW = "rust/recstore/src/optimizer/adamax.rs"

REFERENCE = '''
def adamax(lr: float, eps: float, weight_decay: float = 0.0) -> Rule:
    """Kingma and Ba 2015, algorithm 2."""

    def step(rows: Rows, gradient: Array, table_step: int) -> None:
        decayed = gradient + weight_decay * rows.weight
        rows.first[:] = 0.9 * rows.first + 0.1 * decayed
        rows.second[:] = np.maximum(0.999 * rows.second, np.abs(decayed) + eps)
        rows.weight -= lr / (1 - 0.9**table_step) * rows.first / rows.second

    return step


def _updated_square('''

# Where each file changes, and what stands there afterwards.
EDITS = {
    "rust/recstore/src/optimizer/mod.rs": [
        ("mod adamw;\n", "mod adamax;\nmod adamw;\n"),
        ('    "adamw" =>', '    "adamax" => Adamax(adamax::AdamaxConfig),\n    "adamw" =>'),
    ],
    "tests/python/reference.py": [("\ndef _updated_square(", REFERENCE)],
    "tests/python/test_parity.py": [
        (
            '    "lion": numpy_rival(',
            '    "adamax": numpy_rival("adamax", reference.adamax(0.02, 0.01), lr=0.02, eps=0.01),\n'
            '    "lion": numpy_rival(',
        )
    ],
    "docs/tables.md": [
        (
            "| `adamw` |",
            "| `adamax` | `m += (1-b1)(g-m); u = max(b2*u, abs(g)+eps); w -= lr/(1-b1^t)*m/u` | "
            "`lr`, `betas`, `eps`, `weight_decay` | Kingma and Ba 2015; `torch.optim.Adamax` |\n| `adamw` |",
        )
    ],
    "CHANGELOG.md": [("### Added\n\n", "### Added\n\n- The optimizer `adamax`.\n")],
}

GENERATED = (
    "python/recstore_ops/config/optimizers.py",
    "python/recstore_ops/config/recstore_config.schema.json",
    "docs/checkpoint_format.md",
)

EXAMPLE = 'fn main() { println!("{}", serde_json::json!(recstore::optimizers())); }\n'
"""Prints the registry of the copy, whose native module is not built."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tree in which the recipe was done, and its target folder beside it."""
    tree = tmp_path_factory.mktemp("recipe") / "tree"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    shutil.copyfile(RULE, tree / NEW)
    for name, edits in EDITS.items():
        text = (tree / name).read_text("utf-8")
        for before, after in edits:
            assert text.count(before) == 1 or name == "CHANGELOG.md", (name, before)
            text = text.replace(before, after, 1)
        (tree / name).write_text(text, "utf-8")
    yield tree
    shutil.rmtree(tree.parent)


def cargo(tree: Path, *arguments: str) -> str:
    """What a command of cargo prints in the copy."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tree.parent / "target")}
    command = ["cargo", *arguments]
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_recipe_names_the_files_that_change() -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("### A new optimizer\n")[1].split("```")[1]
    files = [line[2:].split()[0] for line in recipe.strip("\n").splitlines()]
    assert sorted(files) == sorted([NEW, *EDITS])
    assert len(files) == 6


def test_the_rule_is_built_and_passes_the_tests_that_read_the_registry(tree: Path) -> None:
    cargo(tree, "fmt", "--all", "--check")
    tests = ("determinism", "optimizer_state", "configuration", "copies", "checkpoint_round_trip", "row_types")
    named = [word for name in tests for word in ("--test", name)]
    printed = cargo(tree, "test", "--package", "recstore", "--lib", *named)
    assert "test optimizer::adamax::tests::adamax_follows_its_equation ... ok" in printed
    assert "test the_registry_describes_the_slots_of_every_optimizer ... ok" in printed


def test_the_generated_files_have_the_rule(tree: Path) -> None:
    (tree / "rust/recstore/examples/registry.rs").write_text(EXAMPLE, "utf-8")
    registry = tree.parent / "registry.json"
    registry.write_text(cargo(tree, "run", "--quiet", "--package", "recstore", "--example", "registry"), "utf-8")
    write = [sys.executable, ".ci/optimizers.py", "--registry", str(registry)]
    checked = subprocess.run([*write, "--check"], cwd=tree, capture_output=True, text=True, check=False)
    assert re.findall(r"optimizers: (\S+) is not", checked.stderr) == list(GENERATED)
    subprocess.run(write, cwd=tree, check=True)
    subprocess.run([*write, "--check"], cwd=tree, check=True)
    assert "| `adamax` | `exp_avg` dim, `exp_inf` dim |\n" in (tree / GENERATED[2]).read_text("utf-8")
    names = module_of(tree / GENERATED[0])
    assert names.OPTIMIZERS["adamax"] == (("lr", "betas", "eps", "weight_decay"), 0.002, True, "adamax")
    assert '"adamax"' in (tree / GENERATED[1]).read_text("utf-8")


def test_the_reference_is_the_rule_of_torch(tree: Path) -> None:
    reference = module_of(tree / "tests/python/reference.py")
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    twin = weight.clone().requires_grad_()
    optimizer = torch.optim.Adamax([twin], lr=0.02, eps=0.01, weight_decay=0.05)
    zeros = [np.zeros((2, 3)) for _ in range(3)]
    rows, rule = reference.Rows(weight.numpy(), *zeros, np.zeros((2, 1))), reference.adamax(0.02, 0.01, 0.05)
    for step in range(1, 6):
        gradient = torch.sin(torch.arange(6.0, dtype=torch.float64) + step).reshape(2, 3)
        rule(rows, gradient.numpy(), step)
        twin.grad = gradient
        optimizer.step()
    torch.testing.assert_close(torch.from_numpy(rows.weight), twin.detach())


def module_of(file: Path) -> Any:
    """A module of the copy, under a name of its own."""
    name = f"recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
