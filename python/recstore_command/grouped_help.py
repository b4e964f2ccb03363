"""The help of a command with many options: under headings, in few lines."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

# Typer puts defaults that are a text in brackets of their own, in those of all defaults.
_DEFAULT = re.compile(r"(?<=\[default: )\((.*)\)(?=[];])")


class GroupedCommand(TyperCommand):
    """A command whose `--help` lists options under the headings of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a list for each heading, in the order of their first options; those without one come first."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or heading
                groups.setdefault(panel, []).append((record[0], _DEFAULT.sub(r"\1", record[1])))
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
