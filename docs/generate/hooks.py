"""Functions that mkdocs calls while it builds the site: they add generated pages, adapt links, and check the result.

See https://www.mkdocs.org/user-guide/configuration/#hooks. The other modules of this folder make the pages.
"""

from __future__ import annotations

import logging
import posixpath
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import command_line
import indexes
import links
import outward
import python_api

ROOT = Path(__file__).parents[2]
log = logging.getLogger("mkdocs.hooks.plimsoll")  # a warning here is an error of `mkdocs build --strict`


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace a folder in the navigation by its index and its pages."""
    config.nav = [_opened(entry) for entry in config.nav or []]
    return config


def _opened(entry: Any) -> Any:
    if isinstance(entry, str):
        return {indexes.HEADS[_folder(entry)][0]: _pages(entry)} if entry.endswith("/") else entry
    ((title, inner),) = entry.items()
    if isinstance(inner, str):
        return {title: _pages(inner) if inner.endswith("/") else inner}
    return {title: [_opened(child) for child in inner]}


def _folder(entry: str) -> str:
    folder = entry.rstrip("/")
    return folder if (ROOT / folder).is_dir() else f"docs/{folder}"


def _pages(entry: str) -> list[dict[str, str]]:
    pages = [{path.stem: entry + path.name} for path in indexes.pages_in(ROOT / _folder(entry))]
    return [{"All": f"{entry}index.md"}, *pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/: indexes, references, the top of the repository, linked files."""
    from plimsoll import _ADAPTERS, _HOMES
    from plimsoll.cli.main import app

    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    made = {links.on_the_site(folder, ROOT): indexes.index(folder, ROOT) for folder in indexes.HEADS}
    made["reference/command-line.md"] = command_line.page(app)
    made["reference/python.md"] = python_api.page(_HOMES, _ADAPTERS, pages.values())
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    outer = [
        *links.TOP,
        *(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks" / "results").glob("*.md")),
    ]
    for path in outer:
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, links.on_the_site(path, ROOT), content=text))
    for path in sorted(_linked_sources({f"docs/{uri}": text for uri, text in pages.items()}, outer)):
        files.append(_source_page(config, path))
    return files


def _linked_sources(pages: dict[str, str], outer: list[str]) -> set[str]:
    """Return the linked files that are not pages."""
    texts = pages | {path: (ROOT / path).read_text(encoding="utf-8") for path in outer}
    linked = {links.in_the_repository(page, found[1]) for page, text in texts.items() for found in links.links_of(text)}
    files = {path for path in linked if (ROOT / path).is_file()}
    return {path for path in files if not links.is_page(path) and not links.is_picture(path)}


def _source_page(config: MkDocsConfig, path: str) -> File:
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * 6
    language = {".py": "python", ".yaml": "yaml"}.get(Path(path).suffix, "text")
    content = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{fence}{language}\n{text}{fence}\n"
    return File.generated(config, links.on_the_site(path, ROOT), content=content)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the links of handwritten pages. Generated pages already have the links of the site."""
    path = _written_at(page.file.src_uri)
    if path is None:
        return markdown
    try:
        return links.fitted(markdown, path, ROOT) + _glossary_link(path, page.file.src_uri)
    except FileNotFoundError as error:
        log.warning("%s has a link to %s, which is not in the repository", path, error)
        return markdown


def _glossary_link(path: str, uri: str) -> str:
    """Return the last line of a page of docs/: a link to the glossary."""
    if not path.startswith("docs/") or uri == "glossary.md":
        return ""
    return f"\n\n---\n\nWords: [glossary]({posixpath.relpath('glossary.md', posixpath.dirname(uri) or '.')})\n"


def _written_at(uri: str) -> str | None:
    """Return the path of a page in the repository, or `None` for a generated page."""
    by_uri = {uri: path for path, uri in links.TOP.items()}
    places = [by_uri.get(uri), f"docs/{uri}", uri if uri.startswith("benchmarks/") else None]
    return next((path for path in places if path and (ROOT / path).is_file()), None)


def on_post_build(config: MkDocsConfig) -> None:
    """Warn, and so fail a strict build, if a built page would fetch something from outside the site."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        for address in outward.fetched(path.read_text(encoding="utf-8")):
            log.warning("%s fetches %s from outside of the site", path.relative_to(config.site_dir), address)
