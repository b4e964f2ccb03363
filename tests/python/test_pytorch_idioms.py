"""The page of PyTorch's idioms: each line names tests that hold it, and each refusal is one that the package gives."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.optim import swa_utils

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pytorch_idioms.md"
OUTCOMES = {"works", "refused", "differs"}
OF_TORCH = "torch's own error"


class Line(NamedTuple):
    """A line of the page's tables."""

    idiom: str
    outcome: str
    text: str
    tests: list[str]


def lines() -> list[Line]:
    found = []
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if len(cells) == 4 and cells[1] in OUTCOMES:
            found.append(Line(cells[0], cells[1], cells[2], re.findall(r"`([\w/]+\.py::\w+)`", cells[3])))
    return found


@cache
def functions_of(file: str) -> set[str]:
    path = ROOT / "tests" / (file if "/" in file else f"python/{file}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def sentences() -> list[str]:
    """All strings of the package and of the store, with `{}` for what is put in."""
    texts = []
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for folder in ("rust", "cxx_bridge"):
        for path in (ROOT / folder).rglob("*.rs"):
            source = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
            texts += [text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\]|\\.)*)"', source)]
    texts += [
        "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call)).replace('\\"', '"')
        for path in (ROOT / "cxx_bridge").glob("*.h")
        for call in re.findall(r"STD_TORCH_CHECK\((.*?)\);", path.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return texts


def is_given(sentence: str) -> bool:
    """Whether the package has a string with these words; `…` stands for what is put in."""
    parts = sentence.split("…")
    pattern = re.compile(r"(?:\{[^}]*\}|.)*?".join(map(re.escape, parts)), re.DOTALL)
    # Most texts lack a part, which is told sooner than by the pattern.
    return any(pattern.search(text) for text in sentences() if all(part in text for part in parts))


def test_the_page_has_lines() -> None:
    assert len(lines()) > 60
    assert {line.outcome for line in lines()} == OUTCOMES


@pytest.mark.parametrize("line", lines(), ids=lambda line: re.sub(r"[^\w.]+", " ", line.idiom)[:60])
def test_a_line_is_held_by_tests_and_a_refusal_is_given(line: Line) -> None:
    assert line.tests, f"{line.idiom}: no test is named"
    for test in line.tests:
        file, _, function = test.partition("::")
        assert function in functions_of(file), f"{line.idiom}: there is no {test}"
    if line.outcome == "refused" and OF_TORCH not in line.text:
        quoted = re.findall(r"“([^”]+)”", line.text)
        assert quoted, f"{line.idiom}: no sentence is quoted"
        for sentence in quoted:
            assert is_given(sentence), f"{line.idiom}: nothing says {sentence!r}"


def public(module: object) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


NAMES = {
    "torch.func": set(torch.func.__all__) - {"debug_unwrap", "rearrange", "replace_all_batch_norm_modules_"},
    "torch.autograd.functional": set(torch.autograd.functional.__all__),
    "torch.amp": {"autocast", "GradScaler"},
    "torch.optim.Optimizer": public(torch.optim.Optimizer) - {"OptimizerPostHook", "OptimizerPreHook"},
    "torch.optim.swa_utils": {name for name in swa_utils.__all__ if "avg_fn" not in name},
    "torch.autograd.graph": {"saved_tensors_hooks", "save_on_cpu"},
    "torch.autograd": {"backward", "grad", "gradcheck", "gradgradcheck", "no_grad", "inference_mode", "detect_anomaly"},
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in sorted(names)]
)
def test_the_page_has_every_name_of_torch(module: str, name: str) -> None:
    words = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    assert name in words, f"{module}.{name}"
