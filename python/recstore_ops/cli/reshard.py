"""The command `recstore reshard`: spreads rows over another number of servers."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from recstore_ops.config.command_options import path_option, read_user_path
from recstore_ops.servers.resharding import reshard_directory


class _HashMethod(str, Enum):
    CITY_HASH = "city_hash"
    SIMPLE_MOD = "simple_mod"


def reshard_command(
    source: Annotated[
        Path, typer.Argument(help="The `--data` of servers that do not run, or a checkpoint.", parser=read_user_path)
    ],
    shards: Annotated[int, typer.Option(help="How many servers there will be.", min=1)],
    hash_method: Annotated[
        _HashMethod | None, typer.Option(help="How ids are spread over them.", show_default="as before")
    ] = None,
    to: Annotated[Path | None, path_option("Where the new shards go.", shown="the same")] = None,
) -> None:
    """Spread rows over another number of servers, none of which runs.

    The shards before are moved into a directory beside the new ones, and not removed. It takes the memory of one shard.
    """
    method = None if hash_method is None else hash_method.value
    print(reshard_directory(source, to or source, shards, method))
