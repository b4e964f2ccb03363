"""The command `recstore promote`: makes a follower lead its shard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recstore_ops import _native
from recstore_ops.config.command_options import path_option
from recstore_ops.servers.addresses import is_address
from recstore_ops.servers.server_config import Tls, read_token


def promote_command(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The bulk port of a server that follows another.")],
    token_file: Annotated[Path | None, path_option("The token that the server wants to hear.")] = None,
    tls_ca: Annotated[Path | None, path_option("The certificates that are trusted, PEM; encrypts.")] = None,
    tls_certificate: Annotated[Path | None, path_option("The own certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, path_option("The certificate's key, PEM.")] = None,
) -> None:
    """Make a server that follows another one lead its shard.

    The other one hands over, if it lives: then no change is lost. Else what came from it counts. Clients that know both
    servers go on at this one. The other one answers no more, and can follow this one with `--follow`.
    """
    if not is_address(server):
        raise ValueError(f'the server must be "host:port", got "{server}"')
    token = None if token_file is None else read_token(token_file)
    tls = None if tls_ca is None else Tls(tls_certificate, tls_key, tls_ca)
    if tls is None and (tls_certificate or tls_key):
        raise ValueError("--tls-certificate and --tls-key need --tls-ca, the certificates that are trusted")
    try:
        shard, of, epoch, last = _native.promote(server, token, tls)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    print(f"shard {shard} of {of} is led by {server} from change {last} on, in epoch {epoch}")
