"""The page of the Python interface: the public names of the package, and every name that a page of docs/ imports.

Thus every name that a page mentions is documented. mkdocstrings reads the docstrings without running anything.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

HEAD = """# Python

Made from the docstrings when this site is built. `import plimsoll` is quick and does not load torch; a name is loaded
when it is first used.
"""
PROGRAM = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^ *from ([\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)


def page(homes: Mapping[str, tuple[str, str]], adapters: Iterable[str], pages: Iterable[str]) -> str:
    """Return the page with mkdocstrings' marks.

    Args:
        homes: module and name in that module, by public name.
        adapters: modules of `plimsoll.integrations` that are attributes of the package.
        pages: the Markdown of the pages in docs/.
    """
    parts = [HEAD, "## plimsoll\n"]
    parts += [marked(f"{module}.{name}", f"plimsoll.{public}") for public, (module, name) in sorted(homes.items())]
    parts += [f"## plimsoll.{name}\n\n{marked(f'plimsoll.integrations.{name}')}" for name in sorted(adapters)]
    named = told(pages)
    public = {".".join(home) for home in homes.values()}
    for module in sorted(named):
        others = [name for name in sorted(named[module]) if f"{module}.{name}" not in public]
        if others:
            parts += [f"## {module}\n", *(marked(f"{module}.{name}", name) for name in others)]
    return "\n".join(parts)


def marked(path: str, heading: str | None = None) -> str:
    """Return mkdocstrings' mark for a name; only names, not modules, get a heading."""
    options = "show_root_heading: false" if heading is None else f"heading: {heading}\n      toc_label: {heading}"
    return f"::: {path}\n    options:\n      {options}\n"


def told(pages: Iterable[str]) -> dict[str, set[str]]:
    """Return the names that programs on pages import from Plimsoll, by module."""
    found = defaultdict(set)
    for markdown in pages:
        for module, name in imports_of(markdown):
            if module.startswith("plimsoll."):
                found[module].add(name)
    return found


def imports_of(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield modules and names of every ``from ... import ...`` in a page's programs, which may be incomplete."""
    for program in PROGRAM.finditer(markdown):
        for module, in_brackets, on_the_line in IMPORT.findall(program[2]):
            names = re.sub(r"#.*", "", in_brackets or on_the_line).split(",")
            yield from ((module, name.split(" as ")[0].strip()) for name in names if name.strip())
