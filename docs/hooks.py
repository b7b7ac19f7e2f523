"""Hooks of the site: files outside of docs/ that a page links to become part of it.

The pages link to results, sources and studies by relative paths, as GitHub shows them. Here each
such file is added to the site below `repository/`, Markdown as a page, a folder as a page
that lists its files, and the links are rewritten. A link to a file that is not there is left as it
is, and MkDocs reports it.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: Where files from outside of docs/ stand in the site.
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: Files of source code, which a browser shows as plain text under this ending.
SHOWN_AS_TEXT = (".py", ".ipynb", ".yaml", ".toml")


def uri_of(path: Path) -> str:
    """The path in the site of a file or folder of the repository."""
    if path.is_relative_to(DOCS) and path.is_file():
        return path.relative_to(DOCS).as_posix()
    uri = posixpath.join(OUTSIDE, path.relative_to(ROOT).as_posix())
    if path.is_dir():
        return f"{uri}/folder.md"
    return f"{uri}.txt" if path.suffix in SHOWN_AS_TEXT else uri


def path_of(uri: str) -> Path:
    """The file or folder of the repository that stands at a path in the site."""
    if not uri.startswith(f"{OUTSIDE}/"):
        return DOCS / uri
    inside = uri.removeprefix(f"{OUTSIDE}/").removesuffix("/folder.md").removesuffix(".txt")
    return ROOT / inside


def target_of(link: str, page: Path) -> Path | None:
    """The existing file or folder that a link on a page names; None without one."""
    base = page if page.is_dir() else page.parent
    path = Path(os.path.normpath(base / link))
    return path if path.exists() and path.is_relative_to(ROOT) else None


def listing(folder: Path) -> str:
    """Markdown of the page that stands for a folder."""
    entries = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith((".", "__"))
    ]
    rows = (f"- [{path.name}]({path.name})" for path in entries)
    return "\n".join([f"# {folder.relative_to(ROOT).as_posix()}", "", *rows, ""])


def text_of(path: Path) -> str | None:
    """The Markdown of a page; None for a file that is no page."""
    if path.is_dir():
        return listing(path)
    return path.read_text(encoding="utf-8") if path.suffix == ".md" else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to, and those that these link to in turn."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages()]
    known = {file.src_uri for file in files}
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer(FENCE.sub("", text_of(page) or "")):
            target = target_of(match[2], page)
            uri = None if target is None else uri_of(target)
            if target is None or uri is None or uri in known:
                continue
            known.add(uri)
            if target.is_dir():
                files.append(File.generated(config, uri, content=listing(target)))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
            if text_of(target) is not None:
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets stand in the site."""
    here = path_of(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = target_of(match[2], here)
        if target is None:
            return match[0]
        link = posixpath.relpath(uri_of(target), folder)
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])
