"""Options of commands that listen: who may reach them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recstore_ops.config.command_options import path_option

TokenFile = Annotated[Path | None, path_option("Clients must know the token in this file.")]
TlsCertificate = Annotated[Path | None, path_option("Encrypt: the server's certificate and its chain, PEM.")]
TlsKey = Annotated[Path | None, path_option("The certificate's key, PEM.")]
TlsClientCa = Annotated[Path | None, path_option("Clients must show a certificate signed by one of these, PEM.")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Allow other machines to connect without both encryption and a token."),
]
