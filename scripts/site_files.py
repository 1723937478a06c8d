"""Which files the site of the documents has: a hook of mkdocs.yml, which keeps every file's place in the repository.

Pages are those of `docs/`, and what they link to comes along: other pages as pages, a script or a table as it is. So a
link means the same on the site as in the repository, and no link has to name where the repository is published.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = PurePosixPath("docs")


def on_files(files: Files, config: Any) -> Files:
    """Called by MkDocs with the files of `docs/`, named relative to it."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    own = [file for file in files if file.src_dir == config.docs_dir]
    pages = [DOCS / file.src_uri for file in own if file.is_documentation_page() or file.is_css()]
    return Files([*theme, *(_file(path, config) for path in sorted(_with_what_they_link_to(pages)))])


def _with_what_they_link_to(pages: list[PurePosixPath]) -> set[PurePosixPath]:
    found, waiting = set(pages), [*pages]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md":
            new = {path for path in _linked(page) if (ROOT / path).is_file()} - found
            found |= new
            waiting += new
    return found


def _linked(page: PurePosixPath) -> Iterator[PurePosixPath]:
    for link in re.findall(r"\]\(([^)\s#]+)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" not in link:
            target = (ROOT / page.parent / link).resolve()
            if target.is_relative_to(ROOT):
                yield PurePosixPath(target.relative_to(ROOT))


def _file(path: PurePosixPath, config: Any) -> File:
    """`docs/serving.md` becomes `serving/index.html`; what lies elsewhere keeps its folders."""
    file = File(str(path), str(ROOT), config.site_dir, config.use_directory_urls)
    file.dest_uri = file.dest_uri.removeprefix(f"{DOCS}/")
    return file
