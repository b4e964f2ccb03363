"""Commands whose options are the fields of a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from recstore_ops.config.command_options import takes_options_of
from recstore_ops.config.option import Option, errors_name_options, field_values, option_fields
from recstore_ops.training import TrainingConfig

pytestmark = pytest.mark.tier("quick")


class Colour(str, Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    depth: Annotated[int, Option("How deep.", least=1)] = 2


@dataclass(frozen=True)
class Settings:
    no_option: int = 0
    size: Annotated[int | None, Option("How large.", shown="all of it")] = None
    colour: Annotated[Colour, Option("Which colour.", panel="Looks")] = Colour.RED
    is_plain: Annotated[
        bool, Option("With colours.", name="coloured", type=bool, default=False, read=lambda _, given: not given)
    ] = True
    words: Annotated[
        tuple[str, ...], Option("A word.", name="word", type=list[str], read=lambda name, words: (name, *words))
    ] = ()
    seconds: Annotated[float, Option("How long.")] = 600.0
    inner: Inner = field(default_factory=Inner)


def called(*arguments: str, unset: bool = False) -> dict[str, Any]:
    """Calls a command and returns what it was given."""
    calls: list[dict[str, Any]] = []

    @takes_options_of(Settings, unset=unset)
    def command(path: str, *, last: int = 7, **given: Any) -> None:
        calls.append({"path": path, "last": last, **given})

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return calls[0] if calls else {"help": result.output}


def test_each_field_with_an_option_is_one() -> None:
    names = [field.option_name for field in option_fields(Settings)]
    assert names == ["size", "colour", "coloured", "word", "seconds", "depth"]


def test_a_command_gets_defaults_of_the_fields() -> None:
    given = called("here")
    assert (given.pop("path"), given.pop("last")) == ("here", 7)
    assert field_values(Settings, given) == {
        "colour": Colour.RED,
        "is_plain": True,
        "seconds": 600.0,
        "depth": 2,
    }


def test_a_command_gets_what_is_written() -> None:
    arguments = ("--size", "3", "--coloured", "--word", "a", "--word", "b", "--seconds", "5", "--depth", "1")
    given = called("here", *arguments, "--last", "9")
    assert (given.pop("path"), given.pop("last")) == ("here", 9)
    values = {"size": 3, "colour": Colour.RED, "is_plain": False, "words": ("word", "a", "b"), "seconds": 5, "depth": 1}
    assert field_values(Settings, given) == values


def test_options_that_may_stay_unset_are_none_and_show_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    given = called("here", unset=True)
    assert {name for name, value in given.items() if value is None} >= {"size", "colour", "seconds", "depth"}
    monkeypatch.setenv("COLUMNS", "120")
    text = called("--help", unset=True)["help"]
    assert all(shown in text for shown in ("(all of it)", "(red)", "(600)", "(2)"))


def test_the_command_line_checks_its_bounds() -> None:
    with pytest.raises(AssertionError, match="Invalid value for '--depth'"):
        called("here", "--depth", "0")


def test_every_field_of_a_training_run_but_files_is_an_option() -> None:
    names = {field.name for field in fields(TrainingConfig)}
    # Files are arguments; the number of planted test rows is for programs alone.
    assert names - {field.name for field in option_fields(TrainingConfig)} == {"train", "test", "planted_test_rows"}
    assert all(field.option.help and field.option.panel for field in option_fields(TrainingConfig))


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("is_plain must be true", "--coloured must be true"),
        (
            "a run without colours takes no is_plain, and size 5",
            "a run without colours takes no --coloured, and size 5",
        ),
        ("no_option is 3: is_plain", "no_option is 3: --coloured"),
        ("expected is_plain.", "expected --coloured."),
        ("column 'is_plain' is there", "column 'is_plain' is there"),
        ("is_plain.csv and /is_plain and is_plain/x and x/is_plain are files",) * 2,
        ("this_is_plain and is_plainer", "this_is_plain and is_plainer"),
    ],
)
def test_errors_name_options(error: str, shown: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(shown)}$"), errors_name_options(Settings):
        raise ValueError(error)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError, match="is_plain"), errors_name_options(Settings):
        raise KeyError("is_plain")
