"""The documents are true: their code runs, and docs/ops.md shows every schema as it is."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import pydoc
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml

import recstore_ops

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]
GUIDES = (
    "README.md",
    *(f"docs/{page}.md" for page in ("checkpoints", "ids", "index", "modules", "ngrams", "planted")),
    *(f"docs/{page}.md" for page in ("servers", "serving", "state_dict", "tables")),
)
RUN_ELSEWHERE = {f"docs/tutorials/{page.name}" for page in (ROOT / "docs/tutorials").iterdir()}
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("", "benches", "deploy", "docs", "docs/api", "docs/tutorials", "examples")
    for path in (ROOT / folder).glob("*.md")
)
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(recstore_ops.__path__, "recstore_ops.")
    if not module.name.endswith("_native")
    if importlib.util.find_spec("ray") is not None or not module.name.startswith("recstore_ops.ray")
    if importlib.util.find_spec("google.protobuf") is not None
    or not module.name.startswith("recstore_ops.serving.server.")
)


@pytest.fixture(autouse=True)
def _tables_of_examples_are_new() -> None:
    for name in recstore_ops.table_names():
        recstore_ops.RecStoreClient().drop(name)


def code_blocks(guide: str) -> list[tuple[str, str]]:
    text = (ROOT / guide).read_text(encoding="utf-8")
    return [(guide, code) for code in re.findall(r"```python(?: title=\S+)?\n(.*?)```", text, flags=re.DOTALL)]


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_blocks_of_a_guide_run_one_after_the_other(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _, code in code_blocks(guide):
        exec(compile(code, guide, "exec"), names)


def test_no_line_of_the_changelog_stands_twice() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    counts = Counter(line.strip() for line in lines if len(line) > 40)
    assert [line for line, count in counts.items() if count > 1] == []


def test_all_code_in_python_blocks_is_run() -> None:
    assert {page for page in PAGES if code_blocks(page)} == {*GUIDES, *RUN_ELSEWHERE}


def anchors(page: Path) -> set[str]:
    """The places in a page that links can name, as GitHub names them after its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


def test_every_schema_is_documented() -> None:
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_.]+\(.*?\) -> .*?)`", text))
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("recstore::")]
    assert documented == {str(schema).removeprefix("recstore::") for schema in schemas}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_are_right(name: str) -> None:
    names = {"torch": torch, **{public: getattr(recstore_ops, public) for public in recstore_ops.__all__}}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in doctest.DocTestFinder().find(module, globs={**vars(module), **names}):
        runner.run(test)
    # Public classes say that they are of the package itself, so that the search of a module leaves them out.
    for public in (value for value in vars(module).values() if is_defined_in(value, name)):
        for test in doctest.DocTestFinder().find(public, module=False, globs={**vars(module), **names}):
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def is_defined_in(value: object, module: str) -> bool:
    """Whether it is a public class whose code lies in a module."""
    if not isinstance(value, type) or value.__module__ != recstore_ops.__name__:
        return False
    functions = [inspect.unwrap(function) for function in vars(value).values() if inspect.isfunction(function)]
    return any(function.__module__ == module for function in functions)


def test_the_guide_to_servers_lists_the_requests_that_grpc_lacks() -> None:
    wire = (ROOT / "rust/recstore-ps/src/wire/codec/management.rs").read_text(encoding="utf-8")
    requests = re.findall(
        r"^    ([A-Z]\w+)[ ({]", wire.partition("pub enum Management {")[2].partition("\n}\n")[0], re.M
    )
    proto = (ROOT / "rust/recstore-ps/proto/recstore.proto").read_text(encoding="utf-8")
    calls = re.findall(r"rpc (\w+)\(", proto)
    page = (ROOT / "docs/servers.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"`([A-Z]\w+)`", page.partition("The bulk port alone has")[2].partition("recstore.proto says")[0]
    )
    assert len(requests) > 20
    lacking = {name for name in requests if not any(call.startswith(name) for call in calls)}
    assert set(listed) == lacking


def test_the_ratios_of_the_readme_are_those_of_the_benches() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast")[2].partition("## ")[0]
    rows = re.findall(r"^\| (?!work|---).*$", text, re.MULTILINE)
    benches = (ROOT / "benches/README.md").read_text(encoding="utf-8")
    summary = benches.partition("<!-- summary -->")[2].partition("<!-- /summary -->")[0]
    assert len(rows) > 5
    assert set(rows) <= set(summary.splitlines())
    for name in ("date", "commit"):
        value = re.findall(rf"^\| {name} \| (\S+) \|$", benches, re.MULTILINE)[0]
        assert value in text


def test_the_readme_begins_with_both_commands_and_the_minutes_of_the_guide() -> None:
    begin = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(make \w+)` \| .* \| (about \d+ minutes) \|$", begin, re.MULTILINE))
    assert list(rows) == ["make train", "make test"]
    assert re.search(rf"^\| `make test` \| .* \| {rows['make test']} ", CONTRIBUTING, re.MULTILINE)


def test_the_citation_names_the_version_and_the_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == recstore_ops.__version__
    assert citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_every_public_name_is_documented() -> None:
    undocumented = [name for name in recstore_ops.__all__ if not getattr(recstore_ops, name).__doc__]
    assert undocumented == []


def test_the_help_of_a_module_begins_with_its_arguments_units_and_errors() -> None:
    module = recstore_ops.DistEmbedding
    screen = pydoc.plain(pydoc.render_doc(module)).partition("Method resolution order")[0]
    arguments, _, errors = screen.partition("Args:")[2].partition("Raises:")
    named = [
        name for name in inspect.signature(module).parameters if name not in get_type_hints(recstore_ops.TableOptions)
    ]
    assert re.findall(r"^ \|      (\w+): ", arguments, re.MULTILINE) == named
    assert all(unit in arguments for unit in ("in bytes", "in steps and rows"))
    assert re.findall(r"(\w+Error): ", errors) == ["TypeError", "ValueError", "RuntimeError"]
    assert screen.count("\n") < 40


def test_every_public_name_has_one_mark_of_stability() -> None:
    section = (ROOT / "RELEASE.md").read_text(encoding="utf-8").split("## Stable and experimental names")[1]
    rows = re.findall(
        r"^\| (`.*`) \| (?:stable|experimental) \|$", section.split("The same marks hold")[0], re.MULTILINE
    )
    marked = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(marked) == sorted(recstore_ops.__all__)


def test_the_versions_of_formats_are_those_of_the_code() -> None:
    text = (ROOT / "RELEASE.md").read_text(encoding="utf-8").split("## Formats and protocol")[1].split("\n## ")[0]
    rows = re.findall(r"\| ([\d to]+) \| `(\w+)` in `([^`]+)` \|", text)
    assert len(rows) == 7
    for version, constant, file in rows:
        code = (ROOT / file).read_text(encoding="utf-8")
        value = re.search(rf"const {constant}: .*? = (.*);", code)
        assert value, f"{file} has no {constant}"
        # The header of a log has its version as a byte after its magic.
        numbers = re.findall(r"\d+", value[1].replace(r"\0", "").replace(r"\x0", ""))
        assert " to ".join(numbers) == version, (constant, file)


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^### ([^\n]+)\n\nCommit: .*?```\n(.*?)```", CONTRIBUTING, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("recipe", "lines"), RECIPES, ids=[recipe for recipe, _ in RECIPES])
def test_the_files_of_a_recipe_are_there_but_for_its_new_ones(recipe: str, lines: str) -> None:
    files = [line[2:].split()[0] for line in lines.splitlines() if not line.startswith("+ ")]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert "CHANGELOG.md" in files


@pytest.mark.parametrize("folder", ["python/recstore_ops", "rust/recstore/src", "rust/recstore-ps/src"])
def test_the_map_of_rooms_has_every_folder(folder: str) -> None:
    table = CONTRIBUTING.split(f"### {folder}\n")[1].split("\n### ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    rooms = [room for cell in cells for room in re.findall(r"`(\w+)`", cell)]
    folders = {path.name for path in (ROOT / folder).iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert sorted(rooms) == sorted(folders)
