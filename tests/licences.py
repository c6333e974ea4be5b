"""The licence of each distribution that an installed Plimsoll requires, as the distribution states it.

    python tests/licences.py [EXTRA...]

Follows the requirements of the installed distributions, with the named extras. Exits with 1 if a distribution states no
licence, or a licence that extends to programs that use it (GPL, AGPL). The statements are not verified.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_REACHES_OVER = re.compile(r"(?<!L)\b(?:A?GPL|GNU (?:Affero )?General Public)", re.IGNORECASE)


def main() -> None:
    """Print a line for each distribution."""
    wrong = 0
    for name, licence in sorted(licences("torch-plimsoll", sys.argv[1:])):
        is_wrong = not licence or bool(_REACHES_OVER.search(licence))
        wrong += is_wrong
        print(f"{name:32} {licence or 'states none'}{'   <-' if is_wrong else ''}")
    sys.exit(bool(wrong))


def licences(root: str, extras: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the required distributions of one, with their stated licences."""
    todo, seen = [Requirement(f"{root}[{','.join(extras)}]" if extras else root)], set[tuple[str, str]]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            if not any(known == name for known, _ in seen):
                yield name, stated(found)
            seen.add((name, extra))
            needed = (Requirement(text) for text in found.requires or ())
            todo += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]


def stated(found: Distribution) -> str:
    """Return the stated licence: an expression, or the classifiers, or the first line of a text."""
    metadata = found.metadata
    classifiers = [text.split(" :: ")[-1] for text in metadata.get_all("Classifier", []) if text.startswith("License")]
    text = metadata.get("License-Expression") or ", ".join(classifiers) or metadata.get("License") or ""
    return text.strip().splitlines()[0] if text.strip() else ""


if __name__ == "__main__":
    main()
