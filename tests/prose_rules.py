"""Rules for prose that a machine can check: banned phrases, imperative summaries and the length of sentences.

`docs/contributing/style.md` explains them. They cover docstrings, comments and strings of
`src/plimsoll`, and the pages. A reader must judge whether a sentence is good English. To list the faults of files or
folders:

    python tests/prose_rules.py src/plimsoll/data docs/plan.md
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house_rules import WRITTEN_BY_SCRIPTS, Function, Repository, Source, line_of, without

MAX_WORDS = 25

# Phrases that make the reader search for a noun, or that are not English as engineers write it.
PHRASES = {
    r"that of": "name the noun",
    r"those of": "name the noun",
    r"ones? that": "name the noun",
    r"that which": "name the noun",
    r"of which there": "name the noun",
    r"what is there": "name it",
    r"comes? to": "use equals, becomes or reaches",
    r"came to": "use equals, became or reached",
    r"(?:goes|going|gone|went) on(?! (?:the|a|to)\b)": "use continue",
    r"go on": "use continue",
    r"as (?:it|they) says?": "delete it",
    r"for want of": "use without, or because there is no",
    r"there (?:is|was|are|were) none": "use if there is no X",
    r"so many": "use `n`, or up to `n`",
    r"(?:no|any|little|more|less|much|enough|has|have|needs?|leaves?) room": "use memory, space or headroom",
    r"each way": "name the method",
    r"beside(?! the point)": "use next to, besides or in addition to",
    r"of before": "use previous, or from before X",
    r"is had|have been had": "use exists, or is available",
    r"it is gone": "use deleted or freed",
    r"(?<!there )is no (?!longer|more|need)\w+": "use is not a ...",
}
# Words that are rare in good docstrings and comments, and are then used for a noun that is missing.
WORDS = {
    r"what(?:ever)?": "name the noun: the value that ...",
    r"says?|said": "use specifies, sets, reports, returns or raises",
}
# Words that cannot open the summary line of a function, because they are no imperatives.
NO_VERBS = re.compile(
    r"""(?:a|after|all|an|any|as|at|be|before|both|by|during|each|either|everything|every|for|from|go|had|has|have|how|if
    |in|is|it|its|many|most|neither|no|none|nothing|of|on|one|only|other|several|so|some|such|that|the|their|there|these
    |they|this|those|three|to|two|unless|until|what|when|where|whether|which|while|who|whose|why|with)\b|`""",
    re.IGNORECASE | re.VERBOSE,
)
NO_NOUN = re.compile(r"(?:what|whether|how|where|why|that|which)\b", re.IGNORECASE)  # opens no other summary line
NOT_PROSE = re.compile(
    r"^ +\*{0,2}\w+:(?= )|``.+?``|`[^`\n]*`|\"[^\"\n]*\"|“[^”]*”|\]\([^)\n]*\)|https?://\S+", re.DOTALL | re.MULTILINE
)
CODE_ON_PAGES = re.compile(
    r"^(\s*)```.*?^\1```|<!--.*?-->|`[^`\n]*`|\"[^\"\n]*\"|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE
)
HISTORY = {"docs/LOG.md", "docs/contributing/style.md", "CHANGELOG.md"}  # the style page quotes the phrases


@dataclass(frozen=True)
class Text:
    """A docstring, comment or string, and the line where it begins."""

    line: int
    text: str
    kind: str  # function, class, module, comment or string


def docstrings(source: Source) -> Iterator[Text]:
    """Yield the docstrings of a file. The docstring of a property counts as one of a class: it is a noun phrase."""
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            is_verb = isinstance(node, Function) and not any(
                ast.unparse(decorator).endswith(("property", ".setter")) for decorator in node.decorator_list
            )
            kind = "function" if is_verb else "module" if isinstance(node, ast.Module) else "class"
            yield Text(node.body[0].lineno, text, kind)


def comments(source: Source) -> Iterator[Text]:
    """Yield the comments of a file, consecutive whole lines as one text."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (?:noqa|type:|fmt:|--)", token.string):
            alone = token.line.lstrip().startswith("#")
            if block and not (alone and token.start[0] == start + len(block)):
                yield Text(start, " ".join(block), "comment")
                block = []
            if not block:
                start = token.start[0]
            block.append(token.string.lstrip("# "))
    if block:
        yield Text(start, " ".join(block), "comment")


def strings(source: Source) -> Iterator[Text]:
    """Yield the strings of a file that are sentences; a value in an f-string counts as one word."""
    inner = {id(part) for node in source.nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.body[0].value) for node in source.nodes if is_documented(node)}  # type: ignore[attr-defined]
    for node in source.nodes:
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            text = "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) > 3:
            yield Text(node.lineno, text, "string")


def is_documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring or comment, each argument and list item on its own. Code is left out."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |[\w*, ]+: ))", text):
        if (
            not re.match(r"\s*(?:>>>|\.\.\. |\x08|\\b)", paragraph)
            and "    >>>" not in paragraph
            and not is_code(paragraph)
        ):
            plain = NOT_PROSE.sub("X", paragraph)
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(plain.split()))


def is_code(paragraph: str) -> bool:
    return bool(paragraph.strip()) and all(line.startswith("    ") for line in paragraph.splitlines() if line.strip())


def phrases_in(text: str, phrases: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the place and the advice of each banned phrase in a text."""
    for pattern, advice in phrases.items():
        spaced = re.sub("(?<!there) ", r"\\s+", pattern)  # a phrase may stand on two lines
        for found in re.finditer(rf"(?<![\w-])(?:{spaced})(?![\w-])", text, re.IGNORECASE):
            yield found.start(), f"{' '.join(found[0].split())!r}: {advice}"


def no_banned_phrases(repository: Repository) -> Iterator[str]:
    """Docstrings, comments, strings and pages have none of the phrases of `PHRASES`."""
    for source in repository.package:
        for text in (*docstrings(source), *comments(source), *strings(source)):
            banned = PHRASES if text.kind == "string" else PHRASES | WORDS
            yield from (
                f"{source.path}:{text.line}: {text.kind}: {fault}"
                for _, fault in phrases_in(NOT_PROSE.sub("X", text.text), banned)
            )
    for path, page in repository.files.items():
        if path.endswith(".md") and path not in HISTORY and not path.startswith(("benchmarks/", "tests/")):
            prose = without(CODE_ON_PAGES, without(WRITTEN_BY_SCRIPTS, page))
            yield from (f"{path}:{line_of(prose, place)}: {fault}" for place, fault in phrases_in(prose, PHRASES))


def summaries_are_imperatives(repository: Repository) -> Iterator[str]:
    """The docstring of a function begins with a verb; ruff's D401 finds the verbs that are not imperatives."""
    for source in repository.package:
        for text in docstrings(source):
            summary = text.text.splitlines()[0]
            if text.kind == "function" and NO_VERBS.match(summary):
                yield f"{source.path}:{text.line}: {summary!r}: begin with a verb, such as Return or Write"
            elif NO_NOUN.match(summary):
                yield f"{source.path}:{text.line}: {summary!r}: begin with a noun"


def sentences_are_short(repository: Repository) -> Iterator[str]:
    """Docstrings and comments have sentences of at most `MAX_WORDS` words."""
    for source in repository.package:
        for text in (*docstrings(source), *comments(source)):
            for sentence in sentences(text.text):
                if (num_words := len(sentence.split())) > MAX_WORDS:
                    yield f"{source.path}:{text.line}: {num_words} words (at most {MAX_WORDS}): {sentence[:70]}..."


RULES = (no_banned_phrases, summaries_are_imperatives, sentences_are_short)


def main(paths: list[str]) -> None:
    """Print the faults of files and folders."""
    files = [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    texts = {str(file): file.read_text(encoding="utf-8") for file in files if file.suffix in {".py", ".md"}}
    for rule in RULES:
        print(*rule(Repository(texts)), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
