"""Paths that users write: `~` is the home directory in each, and an empty text is refused by the name of what it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import torch
from checkpoints import drop_all_tables

from recstore_ops import (
    DistEmbedding,
    RecStoreClient,
    Tls,
    active_config,
    checkpoint,
    cli,
    inspect_checkpoint,
    load_config_file,
    transfer,
)
from recstore_ops.config.command_options import read_user_path
from recstore_ops.config.paths import user_path
from recstore_ops.servers.server_config import known_servers, read_token
from recstore_ops.training.synthetic.criteo import write_criteo

pytestmark = pytest.mark.tier("quick")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a saved table, its rows, a configuration file and a token."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    drop_all_tables()
    client = RecStoreClient()
    client.init_data("t", (3, 2), torch.float32)
    client.push("t", torch.arange(3), torch.ones(3, 2))
    checkpoint.save(home / "saved")
    transfer.export_safetensors(home / "rows.safetensors", ["t"])
    (home / "config.json").write_text('{"distributed_client": {"servers": [{"port": 1, "shard": 0}]}}')
    (home / "token").write_text("secret")
    return home


def save_part(path: Any) -> None:
    name = checkpoint.new_snapshot_name()
    checkpoint.save_part(path, name, 0, 1)
    checkpoint.commit(path, name, 1)


PATHS: dict[str, tuple[Callable[[Any], object], str]] = {
    "save": (checkpoint.save, "new"),
    "save_async": (lambda path: checkpoint.save_async(path).result(), "new"),
    "client.save": (lambda path: RecStoreClient().save(path), "new"),
    "client.save_async": (lambda path: RecStoreClient().save_async(path).result(), "new"),
    "client.load": (lambda path: RecStoreClient().load(path), "saved"),
    "save_part": (save_part, "parts"),
    "load": (checkpoint.load, "saved"),
    "compact": (checkpoint.compact, "saved"),
    "export_safetensors": (lambda path: transfer.export_safetensors(path, ["t"]), "out.safetensors"),
    "export_parquet": (lambda path: transfer.export_parquet(path, "t"), "out.parquet"),
    "import_safetensors": (transfer.import_safetensors, "rows.safetensors"),
    "load_config_file": (load_config_file, "config.json"),
    "write_criteo": (lambda path: write_criteo(path, 1), "rows.txt"),
    "disk": (lambda path: DistEmbedding(None, 2, "d", memory_limit=1 << 30, disk=path), "saved"),
    "token": (read_token, "token"),
    "tls": (lambda path: open(str(Tls(ca=path).ca)).close(), "token"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_home_directory_is_meant(home: Path, name: str) -> None:
    take, file = PATHS[name]
    take(f"~/{file}")
    assert (home / file).exists()
    take(Path("~") / file)
    assert not Path("~").exists()


def test_a_checkpoint_in_the_home_directory_is_inspected(home: Path) -> None:
    drop_all_tables()
    assert inspect_checkpoint("~/saved").tables.keys() == {"t"}


@pytest.mark.parametrize("name", PATHS)
def test_an_empty_path_is_refused(home: Path, name: str) -> None:
    what = {"disk": "disk", "token": "token_file", "tls": "ca"}.get(name, "path")
    with pytest.raises(ValueError, match=f'{what} must name a file or directory, got ""; "." is the working directory'):
        PATHS[name][0]("")


def test_an_unknown_user_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r'path: there is no home directory "~nobody here"; a file of that name is "\./~'
    ):
        user_path("~nobody here/x")
    assert user_path("./~/x") == "./~/x"
    assert user_path("a~b") == "a~b"


def test_the_environment_and_the_file_name_paths_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = '{"distributed_client": {"servers": [{"port": 1, "shard": 0}], "token_file": "~/token"}}'
    (home / "config.json").write_text(document)
    with monkeypatch.context() as patch:
        patch.setenv("RECSTORE_CONFIG", "~/config.json")
        config = active_config(reload=True)
        assert config is not None
        found = known_servers(config)
        assert found is not None
        assert found.token == "secret"
    active_config(reload=True)


def parsers_of(command: Callable[..., Any]) -> dict[str, Any]:
    """The parser of each option and argument of a command that is a path."""
    hints = get_type_hints(command, include_extras=True) if command.__name__ != "train_command" else {}
    parameters = inspect.signature(command, eval_str=True).parameters
    found = {}
    for name, parameter in parameters.items():
        annotation = hints.get(name, parameter.annotation)
        if get_origin(annotation) is Annotated and "Path" in str(get_args(annotation)[0]):
            found[name] = get_args(annotation)[1].parser
    return found


def test_every_path_of_a_command_is_read_by_one_function() -> None:
    for registered in cli.app.registered_commands:
        command = registered.callback
        assert command is not None
        parsers = parsers_of(command)
        assert all(parser is read_user_path for parser in parsers.values()), (command.__name__, parsers)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", ""),
        ("compact", ""),
        ("train", ""),
        ("generate", ""),
        ("doctor", "--config", ""),
        ("top", "--config", ""),
    ],
)
def test_a_command_refuses_an_empty_path(
    recstore: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert recstore(*arguments) == 2
    assert 'it must name a file or directory, got ""' in " ".join(capsys.readouterr().err.replace("\u2502", "").split())


def test_a_command_takes_a_home_directory(home: Path, recstore: Callable[..., int]) -> None:
    drop_all_tables()
    assert recstore("inspect", "~/saved") == 0
    assert recstore("generate", "~/rows.txt", "--rows", "3") == 0
    assert (home / "rows.txt").exists()
