"""``plimsoll embeddings``: commands that extract, inspect and convert pretrained word vectors."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Command, Force, Quiet

if TYPE_CHECKING:
    from plimsoll.records.base import Record

app = typer.Typer(no_args_is_help=True, help="Extract, inspect and convert pretrained word vectors.")


class _Missing(StrEnum):
    zeros = "zeros"
    mean = "mean"
    normal = "normal"


class _Precision(StrEnum):
    float32 = "float32"
    float16 = "float16"


_WORDS = "Words"
_VECTORS = "Vectors"
_Vectors = Annotated[
    Path, typer.Argument(metavar="VECTORS", help="File of word vectors, also in an archive: a.zip/b.txt.")
]
_InPrecision = Annotated[
    _Precision,
    typer.Option("--precision", metavar="TYPE", help="float32 or float16.", rich_help_panel=_VECTORS),
]
_Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first fault.", rich_help_panel=_VECTORS)]


@app.command("subset", cls=Command)
def subset(  # noqa: PLR0917 -- typer calls it by name
    vectors: _Vectors,
    vocabulary: Annotated[
        Path | None,
        typer.Option(
            "--vocabulary",
            metavar="FILE",
            help="File with one word per line, in the order of the rows.",
            rich_help_panel=_WORDS,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="tokenizer.json or folder: one row per token id.",
            rich_help_panel=_WORDS,
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus", metavar="TEXTS", help="Texts or a job file: count their words.", rich_help_panel=_WORDS
        ),
    ] = None,
    changes: Annotated[list[str] | None, options.changes(_WORDS)] = None,
    min_count: Annotated[
        int,
        typer.Option(
            "--min-count", min=1, metavar="N", help="With --corpus: drop rarer words.", rich_help_panel=_WORDS
        ),
    ] = 1,
    max_words: Annotated[
        int | None,
        typer.Option(
            "--max-words", min=1, metavar="N", help="With --corpus: keep the N most frequent.", rich_help_panel=_WORDS
        ),
    ] = None,
    padding: Annotated[
        str | None,
        typer.Option("--padding", metavar="WORD", help="Word whose row is zeros.", rich_help_panel=_WORDS),
    ] = None,
    ignore_case: Annotated[
        bool,
        typer.Option("--ignore-case/--exact-case", help="Try lower case, then capitalised.", rich_help_panel=_VECTORS),
    ] = True,
    missing: Annotated[
        _Missing,
        typer.Option(
            "--missing", metavar="ROW", help="Missing words: zeros, mean or normal.", rich_help_panel=_VECTORS
        ),
    ] = _Missing.normal,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, metavar="N", help="Random seed of normal rows.", rich_help_panel=_VECTORS),
    ] = 0,
    precision: _InPrecision = _Precision.float32,
    strict: _Strict = False,
    cache: Annotated[Path | None, options.cache("your cache folder")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=".safetensors, .npy: all rows; .txt, .vec, .bin: found words.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Extract the vectors of your words from a file of any size.

    \b
    Examples:
      plimsoll embeddings subset glove.txt --vocabulary words.txt -o words.npy
      plimsoll embeddings subset glove.6B.100d.txt --tokenizer my-tokenizer
      plimsoll embeddings subset cc.en.300.bin --corpus 'corpus/*.txt'
      plimsoll embeddings subset glove.840B.300d.zip --vocabulary words.txt
    """
    from plimsoll.cli.answer import answering
    from plimsoll.embeddings.conversion import require_writable
    from plimsoll.embeddings.wanted_words import WantedWords
    from plimsoll.report.progress import stages

    with answering("extracting the vectors", as_json):
        if output is not None:
            require_writable(output, force, [vectors, *([vocabulary] if vocabulary else [])])
        wanted = WantedWords(
            vocabulary, tokenizer, tuple(corpus or ()), tuple(changes or ()), min_count, max_words, padding
        )
        how = {"missing": missing.value, "ignore_case": ignore_case, "precision": precision.value, "seed": seed}
        with stages(quiet or as_json) as progress:
            found = wanted.rows_of(vectors, output, cache, progress, strict=strict, **how)
        _tell(found, output, as_json)


@app.command("info", cls=Command)
def info(
    vectors: _Vectors,
    strict: _Strict = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Show the words, values and faults of a file of word vectors.

    \b
    Examples:
      plimsoll embeddings info glove.6B.zip/glove.6B.300d.txt
      plimsoll embeddings info GoogleNews-vectors-negative300.bin.gz --json
    """
    from plimsoll.cli.answer import answering
    from plimsoll.embeddings.inspect import look_at
    from plimsoll.report.progress import stages

    with answering("inspecting the vectors", as_json):
        with stages(quiet or as_json) as progress:
            found = look_at(vectors, strict, progress)
        _tell(found, None, as_json)


@app.command("convert", cls=Command)
def convert(  # noqa: PLR0917 -- typer calls it by name
    vectors: _Vectors,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="New .safetensors, .npy, .txt (GloVe), .vec or .bin (word2vec).",
            rich_help_panel=options.OUTPUT,
        ),
    ],
    precision: _InPrecision = _Precision.float32,
    strict: _Strict = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Convert a file of word vectors to another format.

    \b
    Examples:
      plimsoll embeddings convert glove.6B.300d.txt -o glove.safetensors
      plimsoll embeddings convert model.kv -o vectors.npy --precision float16
    """
    from plimsoll.cli.answer import answering
    from plimsoll.embeddings import conversion
    from plimsoll.report.progress import stages

    with answering("converting the vectors", as_json):
        conversion.require_writable(output, force, [vectors])
        with stages(quiet or as_json) as progress:
            done = conversion.convert(vectors, output, precision.value, strict, progress)
        _tell(done, output, as_json)


def _tell(record: Record, output: Path | None, as_json: bool) -> None:
    """Print the record as tables, or as JSON if ``as_json`` is true.

    With an ``output``, the tables go to standard error, and the path of the output to standard output.
    """
    from plimsoll.cli.answer import show_record
    from plimsoll.cli.output import show
    from plimsoll.report.render import render

    if output is not None and not as_json:
        print(render(record), end="", file=sys.stderr)
        show(str(output))
    else:
        show_record(record, as_json)
