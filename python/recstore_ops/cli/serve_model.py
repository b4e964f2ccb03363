"""The command `recstore serve-model`: a bundle behind the Open Inference Protocol, version 2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recstore_ops.cli.access_options import Insecure, TlsCertificate, TlsClientCa, TlsKey, TokenFile
from recstore_ops.config.command_options import path_option, read_user_path, takes_options_of
from recstore_ops.config.extras import require
from recstore_ops.servers.server_config import Tls, read_token
from recstore_ops.serving import PublisherAddress, load_bundle
from recstore_ops.serving.access import Access
from recstore_ops.serving.server.settings import ModelServerSettings

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The bundle.", parser=read_user_path)]
_Name = Annotated[
    str | None, typer.Option(help="The model's name in requests.", show_default="the name of the directory")
]
_Host = Annotated[str, typer.Option(help="Listen here.")]
_Port = Annotated[int, typer.Option(help="The port of HTTP; 0 for any that is free.", min=0, max=65535)]
_GrpcPort = Annotated[
    int | None, typer.Option(help="Serve gRPC too, at this port.", min=0, max=65535, show_default="off")
]
_HealthPort = Annotated[
    int | None,
    typer.Option(
        help="Serve health alone, over HTTP without encryption and token, at this port.",
        min=0,
        max=65535,
        show_default="off",
    ),
]
_MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve metrics too, over HTTP without encryption and token, at this port.",
        min=0,
        max=65535,
        show_default="off",
    ),
]


_Follow = Annotated[
    str | None,
    typer.Option(
        metavar="DIR, HOST:PORT or s3://...",
        help="Follow a model in training that publishes here.",
        show_default="off",
    ),
]
_FollowTokenFile = Annotated[Path | None, path_option("The publisher wants to be told the token in this file.")]
_FollowTlsCa = Annotated[
    Path | None, path_option("The publisher encrypts, with a certificate signed by one of these, PEM.")
]
_Operators = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NS::NAME", help="A further operator that the graph may call; once for each.", show_default="none"
    ),
]
_TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run a bundle's own code: a program without a graph, or a compiled one.")
]


@takes_options_of(ModelServerSettings)
def serve_model_command(
    directory: _Directory,
    name: _Name = None,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    grpc_port: _GrpcPort = None,
    health_port: _HealthPort = None,
    metrics_port: _MetricsPort = None,
    token_file: TokenFile = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Use the compiled program.")] = False,
    follow: _Follow = None,
    follow_token_file: _FollowTokenFile = None,
    follow_tls_ca: _FollowTlsCa = None,
    operators: _Operators = None,
    trust_code: _TrustCode = False,
    **given: Any,
) -> None:
    """Serve a model that `export` wrote until SIGTERM, SIGINT or SIGHUP, over the Open Inference Protocol, version 2.

    Clients of KServe and Triton use this protocol. Concurrent requests are batched if the model allows it.
    """
    require("serve", "serve-model")
    from recstore_ops.serving.server.serving import LAST_ANSWERS, Ports, serve

    settings = ModelServerSettings(**given)
    token = None if token_file is None else read_token(token_file)
    has_tls = not (tls_certificate is None and tls_key is None and tls_client_ca is None)
    tls = Tls(tls_certificate, tls_key, tls_client_ca) if has_tls else None
    ports = Ports(host, port, grpc_port, health_port, metrics_port)
    bundle = load_bundle(
        directory,
        compiled=compiled,
        follow=_followed(follow, follow_token_file, follow_tls_ca),
        operators=operators or (),
        trusted=trust_code,
    )
    left = serve(bundle, name or directory.resolve().name, settings, ports, Access(token, tls, insecure))
    if left:
        raise ValueError(f"{left} requests were not answered within {LAST_ANSWERS:g} s")


def _followed(follow: str | None, token_file: Path | None, ca: Path | None) -> str | PublisherAddress | None:
    if token_file is None and ca is None:
        return follow
    if follow is None:
        raise ValueError("--follow-token-file and --follow-tls-ca need --follow, the address of a publisher")
    token = None if token_file is None else read_token(token_file)
    return PublisherAddress(follow, token, None if ca is None else Tls(ca=ca))
