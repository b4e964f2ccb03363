"""The documents tell the truth: the README's code runs, and docs/ops.md shows every schema as it is."""

import re
from pathlib import Path

import pytest
import torch

import recstore_ops  # noqa: F401

ROOT = Path(__file__).parents[2]


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("code", code_blocks(ROOT / "README.md"))
def test_the_code_of_the_readme_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_every_schema_is_documented() -> None:
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_.]+\(.*?\) -> .*?)`", text))
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("recstore::")]
    assert documented == {str(schema).removeprefix("recstore::") for schema in schemas}
