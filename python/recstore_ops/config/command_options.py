"""Commands whose options are the fields of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar, get_args

import typer

from recstore_ops.config.option import OptionField, option_fields
from recstore_ops.config.paths import user_path


def read_user_path(text: str | PathLike[str]) -> Path:
    """Reads a path of the command line, where it is the `parser` of an option or argument.

    Raises:
        typer.BadParameter: as `recstore_ops.config.paths.user_path`.
    """
    try:
        return Path(user_path(text, "it"))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def path_option(help: str, *names: str, shown: bool | str = False, panel: str | None = None) -> Any:
    """An option that is a path.

    Args:
        help: what `--help` says of it.
        names: those that it has; by default one, that of the parameter.
        shown: the default that `--help` shows; True for the value itself.
        panel: under which heading.
    """
    return typer.Option(
        *names, help=help, show_default=shown, metavar="PATH", parser=read_user_path, rich_help_panel=panel
    )


_Command = TypeVar("_Command", bound=Callable[..., None])


def takes_options_of(configuration: type, *, unset: bool = False) -> Callable[[_Command], _Command]:
    """Gives a command an option for each field of `configuration` that has an `Option`.

    The command gets their values in its `**given`, by the names of the fields. `--help` lists them before the command's
    keyword-only parameters.

    Args:
        configuration: a dataclass.
        unset: what the user does not write is None, because something else decides it; `--help` shows the default.
    """

    def decorate(command: _Command) -> _Command:
        options = [_parameter(field, unset=unset) for field in option_fields(configuration)]
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())
        first = [parameter for parameter in own if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        last = [parameter for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
        # Typer asks for the signature, and calls with keywords alone.
        vars(command)["__signature__"] = signature.replace(parameters=[*first, *options, *last])
        return command

    return decorate


def _parameter(field: OptionField, *, unset: bool) -> inspect.Parameter:
    default = None if unset else field.default
    type = Optional[field.type] if default is None else field.type  # noqa: UP045, for the type is a value here.
    annotation = Annotated[type, _typer_option(field, _shown(field, unset=unset))]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typer_option(field: OptionField, shown: str | bool) -> Any:
    option = field.option
    return typer.Option(
        f"--{field.option_name}",
        help=option.help,
        rich_help_panel=option.panel,
        show_default=shown,
        metavar=option.metavar or ("PATH" if _is_path(field.type) else None),
        parser=read_user_path if _is_path(field.type) else None,
        min=option.least,
        max=option.most,
    )


def _is_path(type: Any) -> bool:
    """Whether a type is a path, several, or perhaps one."""
    return type is Path or Path in get_args(type)


def _shown(field: OptionField, *, unset: bool) -> str | bool:
    """Returns the default that `--help` shows, or whether it shows the parameter's own."""
    if field.option.shown is not None or not unset:
        return field.option.shown or True
    return False if field.default is None else _as_text(field.default)


def _as_text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value)
