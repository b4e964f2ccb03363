"""The commands `recstore checkpoint verify` and `recstore checkpoint prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recstore_ops import checkpoint
from recstore_ops.config.command_options import read_user_path

checkpoint_commands = typer.Typer(
    name="checkpoint",
    help="Maintain the directory of a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_Directory = Annotated[Path, typer.Argument(help="The directory of a checkpoint.", parser=read_user_path)]


@checkpoint_commands.command("verify")
def verify_command(path: _Directory) -> None:
    """Read every file of every snapshot, and list damaged, missing and unexplained files.

    The exit code is 1 if a file is damaged or missing. It needs little memory.
    """
    try:
        report = checkpoint.verify(path)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    for finding in report.findings:
        print(f"{finding.kind}: {finding.file}: {finding.message}")
    what = f"{report.snapshots:,} snapshots, {report.files:,} files, {report.bytes:,} bytes"
    print(f"{path}: {what}: {'sound' if report.is_sound else 'not sound'}")
    if not report.is_sound:
        raise typer.Exit(1)


@checkpoint_commands.command("prune")
def prune_command(
    path: _Directory,
    keep: Annotated[int, typer.Option(help="Full snapshots to keep, with the deltas that follow them.", min=1)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed; remove nothing.")] = False,
) -> None:
    """Remove all but the newest snapshots from a directory.

    The files to remove are printed first. Only files that the manifest lists for these snapshots alone are removed.
    """

    def show(plan: checkpoint.PruneReport) -> None:
        word = "would remove" if dry_run else "removes"
        for snapshot in plan.snapshots:
            print(f"{word} snapshot {snapshot}")
        for name, size in plan.files.items():
            print(f"{word} {name}, {size:,} bytes")

    try:
        plan = checkpoint.prune(path, keep, dry_run=dry_run, on_plan=show)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    print(f"{path}: {len(plan.kept):,} snapshots stay, {len(plan.snapshots):,} {'would go' if dry_run else 'are gone'}")
