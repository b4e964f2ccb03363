"""The command `recstore`. What a user can mend is one sentence and exit code 2, not a traceback."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from recstore_ops._native import __version__
from recstore_ops.cli.checkpoint import checkpoint_commands
from recstore_ops.cli.compact import compact_command
from recstore_ops.cli.doctor import doctor_command
from recstore_ops.cli.evaluate import evaluate_command
from recstore_ops.cli.export import export_command
from recstore_ops.cli.export_vectors import export_vectors_command
from recstore_ops.cli.forget import forget_command
from recstore_ops.cli.inspect import inspect_command
from recstore_ops.cli.neighbours import neighbours_command
from recstore_ops.cli.predict import predict_command
from recstore_ops.cli.promote import promote_command
from recstore_ops.cli.quantize import quantize_command
from recstore_ops.cli.reshard import reshard_command
from recstore_ops.cli.serve import serve_command
from recstore_ops.cli.serve_model import serve_model_command
from recstore_ops.cli.top import top_command
from recstore_ops.config.extras import MissingPackage
from recstore_ops.training.command import train_command
from recstore_ops.training.generated.command import generate_command

app = typer.Typer(
    name="recstore",
    help="An embedding store for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"recstore {__version__}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("predict")(predict_command)
app.command("export-vectors")(export_vectors_command)
app.command("neighbours")(neighbours_command)
app.command("export")(export_command)
app.command("quantize")(quantize_command)
app.command("generate")(generate_command)
app.command("serve")(serve_command)
app.command("serve-model")(serve_model_command)
app.command("promote")(promote_command)
app.command("reshard")(reshard_command)
app.command("top")(top_command)
app.command("inspect")(inspect_command)
app.command("compact")(compact_command)
app.add_typer(checkpoint_commands)
app.command("forget")(forget_command)
app.command("doctor")(doctor_command)


def main() -> None:
    """Runs `recstore`; a ValueError, an OSError or a missing package ends it with exit code 2."""
    try:
        app()
    except (ValueError, OSError, MissingPackage) as error:
        print(f"recstore: {_told(error)}", file=sys.stderr)
        sys.exit(2)


def _told(error: Exception) -> str:
    """The message of an error; of one that the system gave, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
