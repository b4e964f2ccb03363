"""The docstrings that the site shows are read without a warning: `make docs` would end at one."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

griffe: Any = pytest.importorskip("griffe")

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]
SHOWN = sorted(
    {name for page in (ROOT / "docs/api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
)


@pytest.fixture(scope="module")
def package() -> Any:
    return griffe.load("recstore_ops", search_paths=[ROOT / "python"])


def shown_with(found: Any) -> Iterator[Any]:
    """An object and its public members, those of its class members too."""
    yield found
    if found.is_class or found.is_module:
        for name, member in found.members.items():
            if not name.startswith("_") and not member.is_alias:
                yield from shown_with(member)


@pytest.mark.parametrize("name", SHOWN)
def test_a_docstring_says_all_that_the_site_asks_for(package: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = package[name.removeprefix("recstore_ops.")]
    with caplog.at_level(logging.WARNING, logger="griffe"):
        for member in shown_with(found.final_target if found.is_alias else found):
            if member.docstring is not None:
                member.docstring.parse("google")
    assert caplog.messages == []


def test_the_warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    module = griffe.visit(
        "module", Path("module.py"), 'def f():\n    """Does.\n\n    Returns:\n        One.\n    """\n'
    )
    with caplog.at_level(logging.WARNING, logger="griffe"):
        module["f"].docstring.parse("google")
    assert caplog.messages == ["module.py:5: No type or annotation for returned value 1"]
