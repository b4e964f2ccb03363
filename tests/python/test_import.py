"""What `import recstore_ops` does, and what it says where it cannot."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import recstore_ops

pytestmark = pytest.mark.tier("test")

PACKAGE_ROOT = Path(recstore_ops.__file__).parents[1]

WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import recstore_ops
"""


def run(script: str, cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in an interpreter of its own, with `path` before the package on its search path."""
    entries = [*path, PACKAGE_ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(entry) for entry in entries)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def torch_that_is(folder: Path, source: str) -> Path:
    """A folder with a package called torch of this source."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return folder


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    done = run(WITHOUT_TORCH, tmp_path)
    assert last_line(done) == (
        "ImportError: recstore_ops needs PyTorch 2.11 or newer, which is not installed: run `pip install torch`."
    )


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0a0+git1234567", "1.13.1+cu117"])
def test_an_old_torch_is_refused_with_its_version(version: str, tmp_path: Path) -> None:
    old = torch_that_is(tmp_path / "old", f'__version__ = "{version}"')
    done = run("import recstore_ops", tmp_path, old)
    assert last_line(done) == (
        f"ImportError: recstore_ops needs PyTorch 2.11 or newer, and this is {version}: "
        "run `pip install --upgrade torch`."
    )


def test_a_torch_that_fails_to_load_is_not_called_missing(tmp_path: Path) -> None:
    reason = "libcudart.so.13: cannot open shared object file"
    broken = torch_that_is(tmp_path / "broken", f'raise ImportError("{reason}")')
    done = run("import recstore_ops", tmp_path, broken)
    assert reason in last_line(done)
    assert "not installed" not in last_line(done)


def test_importing_works_in_any_directory_and_leaves_the_compiler_and_the_command_line_alone(
    tmp_path: Path,
) -> None:
    script = """
import sys
import recstore_ops
heavy = ["torch._dynamo", "torch._inductor", "matplotlib", "typer", "rich", "pyarrow", "safetensors"]
rooms = ["nn", "ngrams", "client", "checkpoint", "serving", "transfer", "forgetting", "inspect", "training", "cli"]
heavy += [f"recstore_ops.{room}" for room in rooms]
print(*(name for name in heavy if name in sys.modules), sep="\\n")
print(*recstore_ops.table_names(), sep="\\n")
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
    assert list(tmp_path.iterdir()) == []


def test_public_names_come_from_where_type_checkers_find_them() -> None:
    source = Path(recstore_ops.__file__).read_text(encoding="utf-8")
    checked = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    found = {name.name: str(node.module) for node in imports for name in node.names}
    assert found.pop("checkpoint") == "recstore_ops"
    assert {name: f"recstore_ops.{home}" for name, home in recstore_ops._HOMES.items()} == found
    assert sorted([*found, "checkpoint", "__version__"]) == recstore_ops.__all__


def test_public_classes_are_of_the_package_wherever_they_lie() -> None:
    public = [getattr(recstore_ops, name) for name in recstore_ops.__all__]
    kinds = [kind for kind in public if isinstance(kind, type)]
    # Batches stay where they are written, for TorchScript, and are pickled by their public name.
    batches = [kind for kind in kinds if kind.__module__.startswith("recstore_ops.sparse.")]
    assert {kind.__name__ for kind in batches} == {"JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"}
    assert {kind.__module__ for kind in kinds if kind not in batches} == {"recstore_ops"}
    for kind in kinds:
        assert kind.__module__.encode() not in pickle.dumps(kind) or kind not in batches
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert set(recstore_ops.__all__) <= set(dir(recstore_ops))
    assert attrgetter("nn.__name__")(recstore_ops) == "recstore_ops.nn"
    with pytest.raises(AttributeError, match=r"^module 'recstore_ops' has no attribute 'DistEmbeding'$"):
        attrgetter("DistEmbeding")(recstore_ops)


@pytest.mark.tier("all")
def test_the_import_takes_little_beside_that_of_torch(tmp_path: Path) -> None:
    def microseconds() -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import torch; import recstore_ops"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.findall(r"\| +(\d+) \| (torch|recstore_ops)$", done.stderr, re.MULTILINE)
        return {name: int(time) for time, name in found}

    runs = [microseconds() for _ in range(7)]
    fastest = {name: min(run[name] for run in runs) for name in ("torch", "recstore_ops")}
    assert fastest["recstore_ops"] < 0.06 * fastest["torch"]  # 60 ms beside one second.


def test_all_public_names_are_there_and_documented() -> None:
    assert sorted(recstore_ops.__all__) == recstore_ops.__all__
    undocumented = [
        name for name in recstore_ops.__all__ if not name.startswith("__") and not getattr(recstore_ops, name).__doc__
    ]
    assert undocumented == []
