"""The command-line option of a configuration field, beside the field's type and default.

A field has it in its type, `Annotated[int, Option("Rows of one step.")]`. `recstore_ops.config.command_options` makes
the options of commands from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        help: its text in `--help`.
        panel: the part of `--help` that lists it; None: the one of options without a panel.
        name: without dashes before it; None takes the field's.
        shown: the default in `--help`; None shows the default itself, unless that is None.
        metavar: the value's name in `--help`; None: that of its type.
        least, most: bounds that the command line checks.
        type, default: of the value on the command line, if they differ from the field's own.
        read: makes the field's value of it, given the option's name for errors.
    """

    help: str
    panel: str | None = None
    name: str | None = None
    shown: str | None = None
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    type: Any = None
    default: Any = None
    read: Callable[[str, Any], Any] | None = None


@dataclass(frozen=True)
class OptionField:
    """A field that is an option, with its type and its default on the command line."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def option_name(self) -> str:
        """The option without the dashes before it."""
        return self.option.name or self.name.replace("_", "-")


def option_fields(configuration: type) -> Iterator[OptionField]:
    """Yields the fields of a dataclass that are options, and those of the dataclasses that it contains."""
    types = get_type_hints(configuration)
    annotated = get_type_hints(configuration, include_extras=True)
    for field in fields(configuration):
        if is_dataclass(types[field.name]):
            yield from option_fields(types[field.name])
        for option in getattr(annotated[field.name], "__metadata__", ()):
            if isinstance(option, Option):
                yield _option_field(field.name, types[field.name], field.default, option)


def _option_field(name: str, type: Any, default: Any, option: Option) -> OptionField:
    if option.type is not None:
        return OptionField(name, option.type, option.default, option)
    return OptionField(name, type, None if default is MISSING else default, option)


@contextmanager
def errors_name_options(configuration: type) -> Iterator[None]:
    """Lets the errors of what is done within name options, as `--drop-column`, in place of fields, as `drop_columns`.

    Names without `_` are ordinary words, and stay. So does what stands in quotes or in a path.

    Raises:
        ValueError: as what is done within.
    """
    try:
        yield
    except ValueError as error:
        options = {field.name: f"--{field.option_name}" for field in option_fields(configuration) if "_" in field.name}
        names = re.compile(rf"""(?<![\w'"/.-])({"|".join(options)})(?![\w'"/-]|\.\w)""")
        raise ValueError(names.sub(lambda found: options[found[0]], str(error))) from error


def field_values(configuration: type, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that options give a value, from what a command was called with.

    Raises:
        ValueError: a value cannot be read.
    """
    return {
        field.name: _read(field, given[field.name])
        for field in option_fields(configuration)
        if given[field.name] is not None and given[field.name] != []
    }


def _read(field: OptionField, value: Any) -> Any:
    return value if field.option.read is None else field.option.read(field.option_name, value)
