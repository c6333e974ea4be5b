"""Pages that list the pages of a folder. They are generated from the folder, so they are always complete."""

from __future__ import annotations

import re
from pathlib import Path

HEADS = {
    "benchmarks/results": ("Benchmark results", "Results written by the scripts in `benchmarks/`."),
    "docs/contributing": ("For contributors", "Details of [contributing](../contributing.md)."),
    "docs/causes": ("Causes", "Reasons for running out of memory that [`plimsoll explain`](../explain.md) finds."),
    "docs/data": ("Parts of the data pipeline", "Details of [text larger than memory](../data.md)."),
    "docs/embeddings": ("Word vectors", "Formats of [`plimsoll embeddings`](../embeddings.md), and large tables."),
    "docs/formats": ("Formats of text", "Input formats of [text larger than memory](../data.md)."),
    "docs/guides": ("Guides", "Guides by task; [the first page](../index.md) lists all of them."),
    "docs/integrations": ("Trainers and loops", "The same step inside other loops."),
    "docs/recurrent": ("Recurrent nets", "Details of [long sequences with an LSTM](../recurrent.md)."),
    "docs/rules": ("Lint rules", "Mistakes that [`plimsoll lint`](../lint.md) finds in a script."),
    "docs/shrink": ("Compression methods", "The methods of [`plimsoll shrink`](../shrink.md)."),
    "docs/techniques": ("Techniques", "The parts of a [plan](../plan.md). [Add one](../adding-a-technique.md)."),
    "docs/weights": ("Formats of weights", "File formats for [loading models](../loading.md)."),
}  # fmt: skip


def pages_in(folder: Path) -> list[Path]:
    """Return the pages of a folder, sorted by name."""
    return sorted(folder.glob("*.md"))


def index(folder: str, root: Path) -> str:
    """Return the index of a folder of pages: for each page its name, and its heading or first sentence.

    Args:
        folder: from the root of the repository, one of `HEADS`.
        root: the repository.
    """
    title, text = HEADS[folder]
    pages = [(path, about(path.read_text(encoding="utf-8"))) for path in pages_in(root / folder)]
    rows = [f"| [{path.stem}]({path.name}) | {what} |" for path, what in pages]
    return "\n".join([f"# {title}", "", text, "", "| page | about |", "| --- | --- |", *rows, ""])


def about(markdown: str) -> str:
    """Return the subject of a page: its heading after the name, or its first sentence.

    >>> about("# heap: what is freed is kept")
    'what is freed is kept'
    """
    heading, _, body = markdown.lstrip().partition("\n")
    name, colon, said = heading.lstrip("# ").partition(": ")
    if colon:
        return cell(said)
    paragraphs = [paragraph for paragraph in body.split("\n\n") if re.match(r"\s*(?!```)[\w`*\[]", paragraph)]
    sentence = re.split(r"(?<=[.!?])\s", " ".join(paragraphs[0].split()))[0] if paragraphs else name
    return cell(sentence)


def cell(text: str) -> str:
    """Return a text as the cell of a table, with links replaced by their words."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("|", "\\|")
