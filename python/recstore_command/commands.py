"""All commands of `recstore` by name, each imported when it is called."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from recstore_command.grouped_help import GroupedCommand

COMMANDS = {
    "train": ("recstore_ops.training.command:train_command", "Train a model of clicks, or for retrieval, on files."),
    "evaluate": ("recstore_ops.cli.evaluate:evaluate_command", "Print how good a trained model is on files."),
    "predict": ("recstore_ops.cli.predict:predict_command", "Write the probability of each row of files."),
    "export-vectors": ("recstore_ops.cli.export_vectors:export_vectors_command", "Write learnt vectors and their ids."),
    "neighbours": ("recstore_ops.cli.neighbours:neighbours_command", "Print the ids nearest to that of an id."),
    "export": ("recstore_ops.cli.export:export_command", "Write a trained model as a bundle, to be served."),
    "quantize": ("recstore_ops.cli.quantize:quantize_command", "Print what rows of fewer bits cost in quality."),
    "generate": ("recstore_ops.training.synthetic.command:generate_command", "Write generated rows, like Criteo's."),
    "serve": ("recstore_ops.cli.serve:serve_command", "Serve tables to other processes."),
    "serve-model": ("recstore_ops.cli.serve_model:serve_model_command", "Serve a model that `export` wrote."),
    "promote": ("recstore_ops.cli.promote:promote_command", "Make a follower of a server lead its shard."),
    "reshard": ("recstore_ops.cli.reshard:reshard_command", "Spread rows over another number of servers."),
    "top": ("recstore_ops.cli.top:top_command", "Show what parameter servers do, until Ctrl-C."),
    "inspect": ("recstore_ops.cli.inspect:inspect_command", "Show what a checkpoint holds."),
    "compact": ("recstore_ops.cli.compact:compact_command", "Merge a snapshot and its deltas into a full snapshot."),
    "checkpoint": ("recstore_ops.cli.checkpoint:checkpoint_commands", "Verify or prune the directory of a checkpoint."),
    "forget": ("recstore_ops.cli.forget:forget_command", "Delete ids from checkpoints, runs, servers and bundles."),
    "doctor": ("recstore_ops.cli.doctor:doctor_command", "Look at this installation, or at a configuration file."),
}
"""Where each command is, and what the list of all says about it."""

_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class _Commands(TyperGroup):
    """Commands of which a name and a sentence are known until one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that is called, and imports it."""
        name, listed, further = super().resolve_command(ctx, args)
        return name, imported_command(name) if name in COMMANDS else listed, further


@cache
def imported_command(name: str) -> Any:
    """Returns a command, from the module that it is in."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=GroupedCommand)(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="recstore",
    help="An embedding store for PyTorch.",
    cls=_Commands,
    context_settings=_SETTINGS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"recstore {version_of('recstore-ops')}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _only_listed() -> None:
    """Stands for a command in the list of all."""


for _name, (_, _sentence) in COMMANDS.items():
    app.command(_name, help=_sentence)(_only_listed)
