"""Hooks of mkdocs: files of the repository that pages link to become part of the site.

The pages of docs/ link to other files of the repository, as `../examples/kv_worker.py`. Each of these lies in the site
below `repository/`: a page of Markdown as a page, with the files that it links to in turn, and any other as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files, InclusionLevel  # pyright: ignore[reportMissingImports]
from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
BELOW = "repository/"

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^( *```.*?^ *```|<!--.*?-->)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what pages link to, and what those pages link to."""
    waiting = [f"{DOCS}{file.src_uri}" for file in files.documentation_pages()]
    # The navigation has pages of the repository too.
    waiting += re.findall(rf"{BELOW}([\w/.]+\.md)", str(config.nav))
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith(DOCS):
            files.append(_file(path, config))
        found = {target for target in _linked(path) if not target.startswith(DOCS)} if path.endswith(".md") else set()
        waiting += found - seen
        seen |= found
    return files


def _file(path: str, config: MkDocsConfig) -> File:
    level = InclusionLevel.NOT_IN_NAV if path.endswith(".md") else InclusionLevel.INCLUDED
    return File.generated(config, BELOW + path, abs_src_path=str(ROOT / path), inclusion=level)


def _linked(path: str) -> Iterator[str]:
    """The files that a page of Markdown links to, from the root."""
    text = _FENCE.sub("", (ROOT / path).read_text("utf-8"))
    for match in _LINK.finditer(text):
        yield _target(path, match[1])


def _target(path: str, link: str) -> str:
    """The file that a link means, from the root; for a folder its README."""
    target = os.path.normpath(PurePosixPath(path).parent / link)
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links of a page from places in the repository to places in the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(BELOW) if uri.startswith(BELOW) else DOCS + uri

    def rewritten(match: re.Match[str]) -> str:
        target = _target(path, match[1])
        place = target.removeprefix(DOCS) if target.startswith(DOCS) else BELOW + target
        return os.path.relpath(place, PurePosixPath(uri).parent) + (match[2] or "")

    # Code is left as it is: split() gives the fences too, each behind the text before it.
    parts = _FENCE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(rewritten, part) for number, part in enumerate(parts))


def on_page_content(html: str, **_: object) -> str:
    """Takes the backslash from `\\|` in the code of a table's cell, where GitHub takes it too."""
    return re.sub(r"(?<=<code>)([^<]*?)\\\|", r"\1|", html)
