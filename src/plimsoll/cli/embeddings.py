"""``plimsoll embeddings``: the word vectors that are needed taken from a file, a file looked at, a file converted."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from plimsoll.cli.options import Quiet

if TYPE_CHECKING:
    from plimsoll.embeddings.vocabulary import Vocabulary
    from plimsoll.report.progress import Report

app = typer.Typer(no_args_is_help=True, help="Pretrained word vectors: take the rows you need, look, convert.")


class _Missing(StrEnum):
    zeros = "zeros"
    mean = "mean"
    normal = "normal"


class _Precision(StrEnum):
    float32 = "float32"
    float16 = "float16"


_Vectors = Annotated[
    Path, typer.Argument(metavar="VECTORS", help="A file of word vectors; one in an archive: a.zip/b.txt.")
]
_InPrecision = Annotated[_Precision, typer.Option("--precision", help="What the numbers are kept in.")]
_Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first thing that is wrong with the file.")]
_Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables; no progress.")]


@app.command("subset")
def subset(  # noqa: PLR0917 -- typer calls it by name
    vectors: _Vectors,
    vocabulary: Annotated[
        Path | None, typer.Option("--vocabulary", help="A file with a word per line: row i is line i.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json or its folder: row i is id i.")
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option("--corpus", help="Texts (file, folder, pattern) or a job file: count words.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="How a corpus is read: data.text=body.")
    ] = None,
    min_count: Annotated[
        int, typer.Option("--min-count", min=1, help="Of a corpus: words used less are left out.")
    ] = 1,
    max_words: Annotated[
        int | None, typer.Option("--max-words", min=1, help="Of a corpus: only so many, the most frequent.")
    ] = None,
    missing: Annotated[_Missing, typer.Option("--missing", help="Rows of words that are not found.")] = _Missing.normal,
    padding: Annotated[str | None, typer.Option("--padding", help="The word whose row is zeros.")] = None,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case/--exact-case", help="Try lower case, then capitalised.")
    ] = True,
    precision: _InPrecision = _Precision.float32,
    strict: _Strict = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the rows that are drawn.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write all rows (.safetensors .npy) or those found (.txt .vec .bin)."),
    ] = None,
    cache: Annotated[Path | None, typer.Option("--cache", help="Where it is kept. Default: your cache folder.")] = None,
    force: _Force = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Take the vectors of the words you have, in seconds and a few MiB, whatever the size of the file.

    \b
    Examples:
      plimsoll embeddings subset glove.840B.300d.zip --vocabulary words.txt -o words.safetensors
      plimsoll embeddings subset glove.6B.zip/glove.6B.100d.txt --tokenizer my-tokenizer
      plimsoll embeddings subset cc.en.300.bin --corpus 'corpus/*.txt' --min-count 3 --max-words 50000
      plimsoll embeddings subset glove.txt --corpus reviews.csv --set data.text=body --json
    """
    from plimsoll.cli.answer import answering
    from plimsoll.embeddings.conversion import export
    from plimsoll.embeddings.subsets import take_subset
    from plimsoll.report.progress import stages

    with answering("taking the vectors", as_json):
        _check(output, force, [vectors, *([vocabulary] if vocabulary else [])])
        with stages(quiet or as_json) as progress:
            words = _vocabulary(
                _Words(vocabulary, tokenizer, corpus, changes, min_count, max_words, padding), cache, progress
            )
            found = take_subset(
                vectors, words, missing=missing.value, ignore_case=ignore_case, precision=precision.value,
                strict=strict, seed=seed, cache=cache, progress=progress,
            )  # fmt: skip
            if output is not None:
                export(found.table, output)
        _tell(found.facts, output, as_json)


@app.command("info")
def info(
    vectors: _Vectors,
    strict: _Strict = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Say what is in a file of word vectors, looking at every number of it.

    \b
    Examples:
      plimsoll embeddings info glove.6B.zip/glove.6B.300d.txt
      plimsoll embeddings info GoogleNews-vectors-negative300.bin.gz --json
    """
    from plimsoll.cli.answer import answering
    from plimsoll.embeddings.inspect import look_at
    from plimsoll.report.progress import stages

    with answering("looking at the vectors", as_json):
        with stages(quiet or as_json) as progress:
            found = look_at(vectors, strict, progress)
        _tell(found, None, as_json)


@app.command("convert")
def convert(  # noqa: PLR0917 -- as above
    vectors: _Vectors,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The new file: .safetensors .npy .txt (GloVe) .vec .bin (word2vec)")
    ],
    precision: _InPrecision = _Precision.float32,
    strict: _Strict = False,
    force: _Force = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Write all words of a file of word vectors in another format.

    \b
    Examples:
      plimsoll embeddings convert glove.6B.zip/glove.6B.300d.txt -o glove.safetensors
      plimsoll embeddings convert model.kv -o vectors.npy --precision float16
    """
    from plimsoll.cli.answer import answering
    from plimsoll.embeddings import conversion
    from plimsoll.report.progress import stages

    with answering("converting the vectors", as_json):
        _check(output, force, [vectors])
        with stages(quiet or as_json) as progress:
            done = conversion.convert(vectors, output, precision.value, strict, progress)
        _tell(done, output, as_json)


def _check(output: Path | None, force: bool, inputs: list[Path]) -> None:
    from plimsoll.embeddings.conversion import check_output, outputs_of
    from plimsoll.errors import OutputError

    if output is None:
        return
    check_output(output, inputs)
    there = [str(path) for path in outputs_of(output) if path.exists()]
    if there and not force:
        raise OutputError(f"{' and '.join(there)} exists already and is not overwritten: give another -o, or --force")
    if not output.parent.is_dir():
        raise OutputError(f"cannot write {output}, there is no folder {output.parent}: make it, or give another -o")


class _Words(NamedTuple):
    """The options that say which words are wanted."""

    vocabulary: Path | None
    tokenizer: Path | None
    corpus: list[str] | None
    changes: list[str] | None
    min_count: int
    max_words: int | None
    padding: str | None


def _vocabulary(words: _Words, cache: Path | None, progress: Report) -> Vocabulary:
    """Return the words of whichever option names them.

    Raises:
        EmbeddingError: if not exactly one does.
        DataError: if a corpus or a tokenizer cannot be used.
    """
    from plimsoll.embeddings.vocabulary import of_tokenizer, said_padding, vocabulary_of
    from plimsoll.errors import EmbeddingError

    options = {"--vocabulary": words.vocabulary, "--tokenizer": words.tokenizer, "--corpus": words.corpus}
    given = [name for name, value in options.items() if value]
    if len(given) != 1:
        raise EmbeddingError(
            f"{len(given)} options say which words are wanted ({', '.join(given) or 'none'}): give one of --vocabulary "
            "FILE, --tokenizer PATH and --corpus TEXTS"
        )
    of_a_corpus = {"--min-count": words.min_count > 1, "--max-words": words.max_words, "--set": words.changes}
    if not words.corpus and (ignored := [name for name, value in of_a_corpus.items() if value]):
        raise EmbeddingError(f"{' and '.join(ignored)} is for words counted with --corpus: leave it out, or give that")
    if words.corpus:
        return vocabulary_of(_counted(words, words.corpus, cache, progress), words.padding)
    if words.tokenizer is None:
        return vocabulary_of(words.vocabulary, words.padding)
    from plimsoll.data.tokens.given_tokenizer import load_tokenizer

    padding = words.padding or said_padding(words.tokenizer)
    return of_tokenizer(load_tokenizer(words.tokenizer).backend, str(words.tokenizer), padding)


def _counted(words: _Words, texts: list[str], cache: Path | None, progress: Report) -> Vocabulary:
    from plimsoll.cli.data import job_of
    from plimsoll.data.pipeline import TEXTS, Pipeline
    from plimsoll.data.tokens.words import count_words
    from plimsoll.embeddings.vocabulary import of_counts
    from plimsoll.records.base import cache_folder

    pipeline = Pipeline(job_of(texts, words.changes), cache or cache_folder() / "data", progress)
    found = count_words(pipeline.run(TEXTS), progress=progress)
    counts = ((word, found.counts[word]) for word in found.ranked())
    name = ", ".join(texts)
    if found.most_missed:
        name += f" (counts may be up to {found.most_missed:,} too low)"
    return of_counts(counts, name, words.max_words, words.min_count)


def _tell(record: Any, output: Path | None, as_json: bool) -> None:
    """Print the record; with an output its path, and the tables on standard error."""
    import sys

    from plimsoll.cli.output import show
    from plimsoll.report.render import render

    if output is not None and not as_json:
        print(render(record), end="", file=sys.stderr)
        show(str(output))
        return
    show(render(record, "json" if as_json else "text"))
