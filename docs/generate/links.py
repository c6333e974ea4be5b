"""The places of the repository's pages on the site, and their adapted links.

A page is written once, with links that work in the repository. Some targets are elsewhere on the site. A folder is an
index. The pages at the top of the repository and the results of benchmarks join the pages of docs/. Any other file is
shown as a page.

Does NOT cover reference-style links (`[text][name]`), which no page here uses, and links inside HTML.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

TOP = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
PAGES = ("docs/", "benchmarks/results/")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1|(`+)(?!`).*?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"[a-z]+:|//", re.IGNORECASE)


def on_the_site(path: str, root: Path) -> str:
    """Return the page of the site that shows a file or folder of the repository, both as paths from their roots.

    Raises:
        FileNotFoundError: if the repository has no such file or folder.
    """
    if not (root / path).exists():
        raise FileNotFoundError(path)
    if path == "README.md":
        return "index.md"
    if path in TOP:
        return TOP[path]
    inner = path.removeprefix("docs/")
    if (root / path).is_dir():
        return f"{inner}/index.md"
    return inner if is_page(path) or is_picture(path) else f"source/{inner}.md"


def is_page(path: str) -> bool:
    """Return whether a file is a page of the site. Other files are shown as source code."""
    return path in {"README.md", *TOP} or (path.endswith(".md") and path.startswith(PAGES))


def is_picture(path: str) -> bool:
    """Return whether a file is a picture of docs/."""
    return path.startswith("docs/pictures/")


def links_of(markdown: str) -> Iterator[re.Match[str]]:
    """Yield every link to a file: group 1 is its target, group 2 its anchor with `#`. Links in code are left out."""
    in_code = [found.span() for found in CODE.finditer(markdown)]
    for found in LINK.finditer(markdown):
        is_code = any(begin <= found.start() < end for begin, end in in_code)
        if not is_code and not OUTSIDE.match(found[1]):
            yield found


def in_the_repository(page: str, target: str) -> str:
    """Return the path from the root that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def fitted(markdown: str, page: str, root: Path) -> str:
    """Return a page with the links of the site.

    Args:
        markdown: the page.
        page: its path in the repository.
        root: the repository.

    Raises:
        FileNotFoundError: if a link leads to nothing.
    """
    here = posixpath.dirname(on_the_site(page, root))
    parts, end = [], 0
    for found in links_of(markdown):
        path = in_the_repository(page, found[1])
        parts += [markdown[end : found.start()], posixpath.relpath(on_the_site(path, root), here or ".")]
        parts.append(found[2] or "")
        end = found.end()
    return "".join([*parts, markdown[end:]])
