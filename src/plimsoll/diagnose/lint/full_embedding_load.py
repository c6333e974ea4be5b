"""Code that loads all vectors of a pretrained embedding, although a corpus needs only a few per cent of the vectors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Loop, Source, keyword, last_name, path_of

_CLASSES = {"GloVe", "FastText", "CharNGram"}
_FILES = re.compile(r"glove|fasttext|word2vec|w2v|wiki-news|crawl-300|\.vec\b|embed|vectors|emb_", re.IGNORECASE)
_NAMED = re.compile(r"glove|fasttext|charngram", re.IGNORECASE)
_ARRAYS = {"asarray", "array", "fromstring", "tensor", "FloatTensor", "from_numpy", "as_tensor"}


def hits(source: Source) -> Iterator[Hit]:
    """Find library calls that load a whole file of vectors, and loops over such a file that keep every word."""
    for call in source.calls:
        if _loads_all(source, call):
            yield _hit(call)
    for loop in source.every(ast.For):
        statement = _keeps_all(source, loop)
        if statement is not None:
            yield _hit(statement)


def _loads_all(source: Source, call: ast.Call) -> bool:
    name, dotted = last_name(call.func), source.dotted(call.func)
    if name in _CLASSES:
        is_known = bool(re.search(r"^(?:torchtext|torchnlp|pytorch_nlp)\b|vocab\.", dotted))
        is_of_gensim = dotted.startswith("gensim.models")
        return is_known and not is_of_gensim and not keyword(call, "is_include") and not keyword(call, "max_vectors")
    if name in ("load_word2vec_format", "load_facebook_vectors"):
        return keyword(call, "limit") is None
    if dotted in ("gensim.downloader.load", "fasttext.load_model"):
        return True
    if name == "build_vocab":  # torchtext's: vectors="glove.6B.100d"
        given = keyword(call, "vectors")
        return isinstance(given, ast.Constant) and isinstance(given.value, str) and bool(_NAMED.match(given.value))
    return name == "load_model" and dotted.startswith("fasttext.")


def _keeps_all(source: Source, loop: ast.For) -> ast.stmt | None:
    """Return the statement in a loop over the lines of a file that stores the vector of every word.

    ``None`` if no statement does.
    """
    if not _is_of_vectors(source, loop):
        return None
    words = _splits(source, loop)
    if not words or _filters(source, loop):
        return None
    for node in source.own(loop, ast.Assign):
        for target in node.targets:
            if (
                isinstance(target, ast.Subscript)
                and _is_vector(source, loop, node.value)
                and source.loops(node)[:1] == [loop]
            ):
                return node
    return None


def _is_of_vectors(source: Source, loop: ast.For) -> bool:
    """Return whether the source text around a loop mentions word vectors, so it probably reads a file of them."""
    scope = source.scope(loop)
    name = getattr(scope, "name", "")
    holder = source.statement(next((one for one in source.ancestors(loop) if isinstance(one, ast.With)), loop))
    above = "\n".join(source.text.split("\n")[max(0, holder.lineno - 4) : loop.end_lineno])
    return bool(_FILES.search(name + "\n" + above))


def _splits(source: Source, loop: ast.For) -> bool:
    return any(last_name(call.func) in ("split", "rsplit") for call in source.own(loop, ast.Call))


def _filters(source: Source, loop: Loop) -> bool:
    """Return whether a loop stops early, or tests with ``in`` whether to keep a word."""
    if source.own(loop, ast.Break):
        return True
    for node in source.own(loop, ast.If, ast.IfExp):
        for part in ast.walk(node.test):
            if isinstance(part, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in part.ops):
                return True
    return False


def _is_vector(source: Source, loop: ast.For, node: ast.expr, depth: int = 2) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and (last_name(inner.func) in _ARRAYS or source.dotted(inner.func) in ("map",)):
            return True
        if isinstance(inner, ast.ListComp) and isinstance(inner.elt, ast.Call) and last_name(inner.elt.func) == "float":
            return True
    if depth and isinstance(node, ast.Name):
        given = [one.value for one in source.assignments(source.scope(loop), path_of(node))]
        return any(_is_vector(source, loop, one, depth - 1) for one in given)
    return False


def _hit(node: ast.expr | ast.stmt) -> Hit:
    return Hit(
        node,
        "every vector of the file is loaded (GloVe 6B: 400,000 words), but a corpus uses only a few per cent",
        "keep only the words of your vocabulary (`plimsoll embeddings subset FILE --vocabulary words.txt`)",
    )
