"""The command `recstore` in processes of their own that find torch imported, which takes longer than what they do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import plots
import torch
from warm_processes import Ended, WarmProcess

from recstore_ops import cli


class WarmRecstore(WarmProcess):
    """A running `recstore ARGUMENTS`, on one thread of torch; runs show no plots and no theory."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        splits: bool = False,
    ) -> None:
        super().__init__(_run, [str(argument) for argument in arguments], cwd=cwd, env=env, splits=splits)


def run_recstore(*arguments: object, cwd: Path | None = None) -> Ended:
    """Runs `recstore ARGUMENTS` to its end, within `cwd`."""
    return WarmRecstore(*arguments, cwd=cwd, splits=True).ended()


def _run(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    plots.leave_out_all()
    sys.argv = ["recstore", *arguments]
    cli.main()
