"""Writes what Python and the pages say of the store's optimizers, as the registry in Rust has them.

    python .ci/optimizers.py           # after a change of rust/recstore/src/optimizer, on a built checkout
    python .ci/optimizers.py --check   # fails if the files are not those of the registry

The files are `config/optimizers.py`, the optimizers of the schema of configuration files, and the slots in
`docs/checkpoint_format.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "recstore_ops" / "config"
NAMES, SCHEMA = PACKAGE / "optimizers.py", PACKAGE / "recstore_config.schema.json"
SLOTS = ROOT / "docs" / "checkpoint_format.md"
BEGIN, END = "| optimizer | slots in order, and their width |\n|---|---|\n", "| any, with `ema_decay` in `config`"
WIDTH = 120

Optimizer = Mapping[str, Any]

HEAD = '''"""The optimizers of the store, as its registry has them. `.ci/optimizers.py` writes this file."""

from typing import Literal, NamedTuple

OptimizerName = Literal[%s]


class Optimizer(NamedTuple):
    """An optimizer of tables.

    Attributes:
        options: the keys of its configuration, the learning rate's first.
        lr: the learning rate of `recstore train`, unless another is chosen.
        weight_decay: whether `recstore train --weight-decay` goes with it.
        dense: the optimizer of `torch.optim` for the parameters beside the tables, unless another is chosen.
    """

    options: tuple[str, ...]
    lr: float
    weight_decay: bool
    dense: str


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
'''


def names_of(optimizers: Iterable[Optimizer]) -> str:
    """The module of Python."""
    lines = [HEAD % ", ".join(json.dumps(each["kind"]) for each in optimizers)]
    for each in optimizers:
        options, training = tuple(option["name"] for option in each["options"]), each["training"]
        values = f"{options}, {training['lr']}, {training['weight_decay']}, {training['dense']!r}"
        lines.append(f"    {each['kind']!r}: Optimizer({values}),\n")
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(NAMES), "-"]
    formatted = subprocess.run(command, input="".join(lines) + "}\n", capture_output=True, check=True, text=True)
    return formatted.stdout


def schema_of(optimizers: Iterable[Optimizer], schema: dict[str, Any]) -> str:
    """The schema of configuration files with these optimizers."""
    kinds = [each["kind"] for each in optimizers]
    definitions = schema["$defs"]
    definitions["optimizer"]["then"]["enum"] = kinds
    definitions["optimizer"]["else"]["allOf"] = [
        {
            "if": {"required": ["kind"], "properties": {"kind": {"enum": [kind]}}},
            "then": {"$ref": f"#/$defs/{kind}"},
        }
        for kind in [*kinds, "rule"]
    ]
    definitions["optimizer_kind"]["enum"] = [*kinds, "rule"]
    definitions |= {each["kind"]: _options(each["options"]) for each in optimizers}
    return _as_text(schema) + "\n"


def _options(options: list[Optimizer]) -> dict[str, Any]:
    rate, *others = options
    properties = {"kind": {}, rate["name"]: _option(rate), "lr": _option(rate)}
    return {
        "properties": properties | {option["name"]: _option(option) for option in others},
        "additionalProperties": False,
    }


def _option(option: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": option["description"]}
    match option["default"]:
        case bool():
            return {**described, "type": "boolean"}
        case str():
            return {**described, "enum": option["choices"]}
        case list() as several:
            count, item = len(several), {"$ref": f"#/$defs/{option['range']}"}
            return {**described, "type": "array", "items": item, "minItems": count, "maxItems": count}
        case _:
            return {**described, "$ref": f"#/$defs/{option['range']}"}


def _as_text(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON whose objects and lists stand in a line each if they fit in it."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or indent + before + len(line) < WIDTH:
        return line
    inner = indent + 2
    if isinstance(value, dict):
        keys = [f"{json.dumps(key)}: " for key in value]
        items = [key + _as_text(each, inner, len(key)) for key, each in zip(keys, value.values(), strict=True)]
    else:
        items = [_as_text(each, inner) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(" " * inner + item for item in items)
    return f"{opening}\n{lines}\n{' ' * indent}{closing}"


def slots_of(optimizers: Iterable[Optimizer]) -> str:
    """The rows of the table of slots."""
    return "".join(f"| `{each['kind']}` | {_slots(each)} |\n" for each in optimizers)


def _slots(optimizer: Optimizer) -> str:
    options = {option["name"]: option for option in optimizer["options"]}
    always = ", ".join(_slot(slot) for slot in optimizer["slots"] if slot["with"] is None)
    others = [
        f"with {_condition(options[slot['with']])} {'also ' if always else ''}{_slot(slot)}"
        for slot in optimizer["slots"]
        if slot["with"] is not None
    ]
    return "; ".join([always or "none", *others])


def _slot(slot: Mapping[str, Any]) -> str:
    return f"`{slot['name']}` {'dim' if slot['width'] is None else slot['width']}"


def _condition(option: Mapping[str, Any]) -> str:
    match option["default"]:
        case bool():
            return f'`"{option["name"]}": true`'
        case str():
            return f'`"{option["name"]}": "{option["choices"][1]}"`'
        case _:
            return f"`{option['name']}` above 0"


def between(page: str, begin: str, end: str, content: str) -> str:
    """A page with other content between two of its lines."""
    return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: begin + content + end, page, flags=re.DOTALL)


def _of_module() -> str:
    from recstore_ops import _native

    return _native.optimizers()


def main() -> int:
    """Writes the files, or says which of them are not those of the registry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file would change")
    parser.add_argument("--registry", type=Path, help="what `_native.optimizers()` returns, in a file")
    options = parser.parse_args()
    optimizers = json.loads(options.registry.read_text("utf-8") if options.registry else _of_module())
    page, schema = SLOTS.read_text("utf-8"), json.loads(SCHEMA.read_text("utf-8"))
    contents = {
        NAMES: names_of(optimizers),
        SCHEMA: schema_of(optimizers, schema),
        SLOTS: between(page, BEGIN, END, slots_of(optimizers)),
    }
    changed = [file for file, text in contents.items() if not file.exists() or file.read_text("utf-8") != text]
    for file in changed:
        if options.check:
            print(
                f"optimizers: {file.relative_to(ROOT)} is not that of the registry: run .ci/optimizers.py",
                file=sys.stderr,
            )
        else:
            file.write_text(contents[file], "utf-8")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
