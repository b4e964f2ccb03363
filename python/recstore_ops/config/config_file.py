"""`recstore_config.json`: the options of tables that the program opening them does not give.

`RECSTORE_CONFIG` names the file; otherwise it is the nearest `recstore_config.json` in the working directory and the
folders above it. RecStore's own file loads too: its keys for servers and storage are named in one warning, for they
have no effect here. `recstore_config.schema.json` is the schema of the file.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from recstore_ops.config.distinct_keys import distinct_keys
from recstore_ops.config.json_schema import Problem, Schema, find_problems
from recstore_ops.config.keywords import takes
from recstore_ops.config.paths import user_path
from recstore_ops.config.table_config import TableConfig, check_name_and_dim
from recstore_ops.config.table_options import DEFAULT_LR, ConfigOptions, given, options_of

_SECTIONS = ("cache_ps", "distributed_client")
_THIS_MACHINE = "127.0.0.1"


def server_problems(document: dict[str, Any]) -> list[Problem]:
    """Returns what is wrong with the sections of a document that its schema finds valid."""
    problems: list[Problem] = []
    for name in _SECTIONS:
        section = document.get(name, {})
        problems += [*_shards(name, section), *_number(document, name, section), *_tls(name, section)]
        problems += _addresses(name, section)
    return problems


def _host(server: dict[str, Any]) -> str:
    return server.get("host", _THIS_MACHINE)


def _shards(name: str, section: dict[str, Any]) -> Iterator[Problem]:
    found = [server["shard"] for server in section.get("servers", [])]
    if sorted(found) != list(range(len(found))):
        yield Problem(f"{name}.servers", f"must have each shard from 0 to {len(found) - 1} once, got {found}")


def _number(document: dict[str, Any], name: str, section: dict[str, Any]) -> Iterator[Problem]:
    """Compares `num_shards` with the servers of its section, or with those that a client takes without any."""
    own = section.get("servers", document.get("cache_ps", {}).get("servers"))
    known = 1 if own is None and "client" in document else len(own or ())
    asked = section.get("num_shards", known)
    if asked != known:
        yield Problem(f"{name}.num_shards", f"must be the number of servers, {known}, got {asked}")


def _tls(name: str, section: dict[str, Any]) -> Iterator[Problem]:
    tls = section.get("tls", {})
    if ("certificate" in tls) != ("key" in tls):
        yield Problem(f"{name}.tls", "needs both certificate and key, or neither")


def _addresses(name: str, section: dict[str, Any]) -> Iterator[Problem]:
    """Finds ports that two would have on one machine; a port 0 is any that is free."""
    servers, common = section.get("servers", []), section.get("metrics_port")
    taken = [(_host(server), server["port"]) for server in servers]
    taken += [(_host(server), server.get("metrics_port", common)) for server in servers]
    for (host, port), count in Counter(taken).items():
        if port and count > 1:
            yield Problem(f"{name}.servers", f"{count} ports have the address {host}:{port}")


FILE_NAME = "recstore_config.json"
PATH_VARIABLE = "RECSTORE_CONFIG"

_INTEGERS = ("num_embeddings", "embedding_dim", "seed", "block_size", "memory_limit")
_SERVER_KEYS = ("cache_ps", "client", "distributed_client")
_OF_RECSTORE = {
    "cache_ps": ("ps_type", "max_batch_keys_size", "num_threads", "base_kv_config"),
    "distributed_client": ("max_keys_per_request",),
}
"""Keys of sections that have an effect, which have none themselves."""


@dataclass(frozen=True)
class TableEntry:
    """The entry of one table in a configuration file; `None` for each option that it does not set.

    Attributes:
        num_embeddings: ids outside `[0, num_embeddings)` are refused.
        embedding_dim: elements a row; a program that opens the table with another number is refused.
        learning_rate: the learning rate, if the optimizer has none of its own.
        optimizer: this and all that follow are as in `recstore_ops.TableOptions`; a type of rows by its name.
    """

    num_embeddings: int | None = None
    embedding_dim: int | None = None
    learning_rate: float | None = None
    optimizer: str | dict[str, Any] | None = None
    initializer: str | dict[str, Any] | None = None
    dtype: str | None = None
    seed: int | None = None
    block_size: int | None = None
    max_grad_norm: float | None = None
    state_dtype: str | None = None
    ema_decay: float | None = None
    nan_policy: str | None = None
    admission: dict[str, Any] | None = None
    eviction: dict[str, Any] | None = None
    memory_limit: int | None = None
    disk: str | None = None


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file that was read and found valid.

    Attributes:
        path: the path of the file.
        embedding_tables: its entries of tables, by name.
        without_effect: the keys of RecStore's file that have no effect here.
        recstore: its entries for servers, in RecStore's keys; see `recstore_ops.servers.server_config`.
    """

    path: Path
    embedding_tables: dict[str, TableEntry] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    recstore: dict[str, Any] = field(default_factory=dict)


def active_config(reload: bool = False) -> ConfigFile | None:
    """Returns this process's configuration file, or `None` if there is none.

    It is looked for and read at the first call, and again only with `reload`.

    Raises:
        ValueError: as `load_config_file`.
        OSError: the file that `RECSTORE_CONFIG` names cannot be read.
    """
    if reload:
        _load_active.cache_clear()
    return _load_active()


@functools.cache
def _load_active() -> ConfigFile | None:
    path = find_config_file()
    return None if path is None else load_config_file(path)


def find_config_file() -> Path | None:
    """Returns where the configuration file of this process is, or `None`.

    Raises:
        ValueError: what has its name in the nearest folder is no file.
    """
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(user_path(named, PATH_VARIABLE))
    here = Path.cwd()
    candidates = (folder / FILE_NAME for folder in (here, *here.parents))
    path = next((path for path in candidates if os.path.lexists(path)), None)
    if path is not None and not path.is_file():
        raise ValueError(f"{path}: expected a configuration file, got a directory, a broken link or a special file")
    return path


def load_config_file(path: str | os.PathLike[str]) -> ConfigFile:
    """Reads a configuration file and warns of the keys that have no effect here.

    Raises:
        ValueError: the file is no JSON, or holds an unknown key or an invalid value; the message names each by its
            path, as in `embedding_tables.user.optimzer`.
        OSError: the file cannot be read.
    """
    path = Path(user_path(path))
    document = read_document(path)
    problems = document_problems(document)
    if problems:
        raise ValueError(f"{path}: {'; '.join(map(str, problems))}")
    config = config_from_document(path, document)
    if config.without_effect:
        names = ", ".join(config.without_effect)
        warnings.warn(f"{path}: without effect here, where tables live in this process: {names}", stacklevel=2)
    return config


def read_document(path: Path) -> Any:
    """Reads JSON, refusing what JSON libraries read in different ways: NaN, infinity and a key given twice.

    Raises:
        ValueError: the file is no such JSON.
        OSError: the file cannot be read.
    """
    try:
        return json.loads(
            path.read_bytes(), parse_constant=_refuse_constant, object_pairs_hook=distinct_keys(_given_twice)
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: its arrays and objects are nested too deeply") from None


def document_problems(document: Any) -> list[Problem]:
    """Returns all that is wrong with the JSON value of a configuration file."""
    # The second takes keys and types for granted, and looks only at a document that fits the schema.
    return find_problems(document, config_schema()) or server_problems(document)


def optimizer_problems(optimizer: dict[str, Any]) -> list[Problem]:
    """Returns all that is wrong with the optimizer of a table, `{"kind": ..., ...}`."""
    schema = config_schema()
    return find_problems(optimizer, {"$defs": schema["$defs"], "$ref": "#/$defs/optimizer"})


@functools.cache
def config_schema() -> Schema:
    """The JSON Schema of the configuration file, draft 2020-12."""
    return json.loads(resources.files("recstore_ops.config").joinpath("recstore_config.schema.json").read_text("utf-8"))


@takes(ConfigOptions)
def configure_table(
    name: str,
    embedding_dim: int,
    num_embeddings: int | None = None,
    *,
    lr: float = DEFAULT_LR,
    **options: Unpack[ConfigOptions],
) -> TableConfig:
    """Returns the configuration of a table: from the arguments given, then the configuration file, then the defaults.

    Args:
        name: the table's name.
        embedding_dim: elements a row, which the file may only repeat.
        num_embeddings: the number of ids; `None` if not given.
        lr: the learning rate, if neither the optimizer nor the file has one.
        **options: as in `TableOptions`; `None` if not given.

    Raises:
        TypeError: an option of another name, or with a value of another type; or the name is no text.
        ValueError: the file has another `embedding_dim`, or is invalid.
    """
    check_name_and_dim(name, embedding_dim)
    config = active_config()
    entry = config.embedding_tables.get(name, TableEntry()) if config else TableEntry()
    if config and entry.embedding_dim not in (None, embedding_dim):
        raise ValueError(
            f'table "{name}" has embedding_dim {entry.embedding_dim} in {config.path}, '
            f"but is opened with {embedding_dim}"
        )
    bound = entry.num_embeddings if num_embeddings is None else num_embeddings
    rate = lr if entry.learning_rate is None else entry.learning_rate
    try:
        return TableConfig.of(bound, rate, {**options_of(entry), **given(options)})
    except (TypeError, ValueError) as error:
        raise type(error)(f'table "{name}": {error}') from None


@contextmanager
def same_entries(names: Mapping[str, str]) -> Iterator[None]:
    """Within, the configuration file says of tables of some names what it says of others.

    Args:
        names: the other name by each name.
    """
    config = active_config()
    tables = config.embedding_tables if config else {}
    added = {name: tables[other] for name, other in names.items() if other in tables}
    # The cached file itself is changed: whatever opens a table within reads its entry there.
    tables.update(added)
    try:
        yield
    finally:
        for name in added:
            del tables[name]


def config_from_document(path: Path, document: dict[str, Any]) -> ConfigFile:
    """Turns a document without problems into what it says."""
    tables = {name: _entry(table) for name, table in document.get("embedding_tables", {}).items()}
    others = {key: value for key, value in document.items() if key not in ("$schema", "embedding_tables")}
    recstore = {key: others[key] for key in _SERVER_KEYS if key in others}
    client = recstore.get("distributed_client")
    # Unless it chooses servers, what it says of them is for `recstore serve` and `set_ps_backend` alone.
    used = _SERVER_KEYS if isinstance(client, dict) and "servers" in client else ()
    unused = [key for key in others if key not in used]
    unused += [f"{key}.{inner}" for key in used for inner in _OF_RECSTORE.get(key, ()) if inner in others.get(key, {})]
    return ConfigFile(path, tables, tuple(unused), recstore)


def _entry(table: dict[str, Any]) -> TableEntry:
    """Reads a table that was found valid; JSON Schema takes 1.0 for an integer."""
    integers = {key: int(table[key]) for key in _INTEGERS if table.get(key) is not None}
    return TableEntry(**{**table, **integers})


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


def _given_twice(key: str, _first: Any, _second: Any) -> ValueError:
    return ValueError(f'the key "{key}" is given twice')


__all__ = [
    "FILE_NAME",
    "PATH_VARIABLE",
    "ConfigFile",
    "TableEntry",
    "active_config",
    "config_from_document",
    "config_schema",
    "configure_table",
    "document_problems",
    "find_config_file",
    "load_config_file",
    "read_document",
    "same_entries",
]
