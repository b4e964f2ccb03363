"""What needs no more than torch and numpy, and what the rest says without its extra."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from recstore_command.commands import COMMANDS
from recstore_ops.config.extras import EXTRAS, MissingPackage, imported, require
from recstore_ops.config.progress_bars import progress_bar

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[2]
OF_RUNS = ("train", "evaluate", "predict", "export-vectors", "neighbours", "export", "quantize", "generate")
"""Commands that train, or read the data of a run."""

MODULES = {"protobuf": "google.protobuf"}
"""The modules of packages, where they have another name."""

WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({sorted({module for modules in EXTRAS.values() for module in modules})!r}))
"""


def run_without_extras(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + script], cwd=folder, capture_output=True, text=True, timeout=120
    )


def requirements(lines: list[str]) -> set[str]:
    """The modules of packages, without those that only older interpreters need."""
    names = [re.split(r"[><=; ]", line)[0] for line in lines if "python_version" not in line]
    return {MODULES.get(name, name) for name in names}


def test_the_extras_are_those_of_the_project() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {extra: requirements(lines) for extra, lines in project["optional-dependencies"].items()} == {
        extra: set(modules) for extra, modules in EXTRAS.items()
    }
    assert requirements(project["dependencies"]) == {"torch", "numpy"}


def test_a_model_trains_and_is_saved_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    done = run_without_extras(
        """
import torch, recstore_ops
public = [getattr(recstore_ops, name) for name in recstore_ops.__all__]
model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4), torch.nn.Linear(4, 1))
replaced = recstore_ops.replace_embeddings(model, grows=True)
optimizers = [replaced.optimizer, torch.optim.SGD(replaced.dense_parameters(), lr=0.1)]
for _ in range(3):
    model(torch.tensor([[1, 2**40]])).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
recstore_ops.checkpoint.save("saved")
recstore_ops.checkpoint.load("saved")
print(recstore_ops.table_statistics("0")["rows"])
recstore_ops.transfer.export_safetensors("rows.safetensors", [model[0]])
recstore_ops.freeze(model[0].table, "frozen")
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "11\n"), done.stderr


NEEDS = {
    "import recstore_ops.training": "recstore_ops.training needs matplotlib: pip install 'recstore-ops[train]'",
    "import recstore_ops.ray": "recstore_ops.ray needs ray: pip install 'recstore-ops[ray]'",
    "recstore_ops.checkpoint.save('saved', progress=True)": (
        "a progress bar needs tqdm: pip install 'recstore-ops[train]'"
    ),
    "recstore_ops.transfer.import_safetensors('x.safetensors')": (
        "the safetensors file x.safetensors needs safetensors: pip install 'recstore-ops[train]'"
    ),
}
"""What each statement says without its extra."""


def test_what_needs_more_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    done = run_without_extras(
        f"""
import recstore_ops, recstore_ops.transfer
from recstore_ops.config.extras import MissingPackage
for statement in {list(NEEDS)!r}:
    try:
        exec(statement)
    except MissingPackage as error:
        print(error)
""",
        tmp_path,
    )
    assert (done.stdout.splitlines(), done.stderr) == (list(NEEDS.values()), "")


def test_the_command_says_what_to_install(tmp_path: Path) -> None:
    done = run_without_extras("from recstore_command import main; main()", tmp_path)
    sentence = "recstore: recstore needs rich: pip install 'recstore-ops[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_each_command_needs_the_extra_of_what_it_does(tmp_path: Path) -> None:
    script = f"""
import sys
for module in ("rich", "typer"):
    del sys.modules[module]
from recstore_command import main
for command in {list(COMMANDS)!r}:
    sys.argv = ["recstore", command, "--help"]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code, command)
"""
    done = run_without_extras(script, tmp_path)
    ended = {line.split()[3]: line.split()[2] for line in done.stdout.splitlines() if line.startswith("exit code")}
    assert ended == {command: "2" if command in OF_RUNS else "0" for command in COMMANDS}
    sentence = "recstore: recstore_ops.training needs matplotlib: pip install 'recstore-ops[train]'\n"
    assert done.stderr == sentence * len(OF_RUNS)


def test_the_module_of_the_package_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recstore_ops", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "serve-model" in done.stdout


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    missing = r"^a server needs google\.protobuf: pip install 'recstore-ops\[serve\]'$"
    for call in (lambda: require("serve", "a server"), lambda: imported("google.protobuf", "serve", "a server")):
        with pytest.raises(MissingPackage, match=missing):
            call()
    require("train", "this test")


def test_a_bar_is_hidden_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(None, total=2) as hidden:
        hidden.update(2)
    assert capsys.readouterr().err == ""
    with progress_bar(True, total=2, desc="moving") as shown:
        shown.update(2)
    assert "moving: 100%" in capsys.readouterr().err
