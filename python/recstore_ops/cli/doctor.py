"""The command `recstore doctor`: prints what `recstore_ops.doctor` finds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from recstore_ops.config.command_options import path_option
from recstore_ops.doctor.examination import Finding, examine, examine_config

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor_command(
    config: Annotated[Path | None, path_option("Validate this configuration file instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of the findings.")] = False,
) -> None:
    """Check this installation and machine, or a configuration file: print findings and advice.

    The exit code is 1 if something will not work.
    """
    findings = examine() if config is None else examine_config(config)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.state == "error" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    console = Console()
    width = max((len(finding.topic) for finding in findings), default=0)
    for finding in findings:
        state = Text(f"{finding.state:<7}", style=_STYLES[finding.state])
        console.print(state, f"{finding.topic:<{width}} ", finding.found, markup=False, highlight=False, soft_wrap=True)
        if finding.advice:
            console.print(" " * (width + 9), f"-> {finding.advice}", markup=False, highlight=False, soft_wrap=True)
    if not findings:
        console.print("nothing is configured")
