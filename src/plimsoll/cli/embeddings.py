"""``plimsoll embeddings``: the word vectors that are needed taken from a file, a file looked at, a file converted."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli.options import AsJsonAlone, Cache, Force, Quiet

if TYPE_CHECKING:
    from plimsoll.records.base import Record

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
    cache: Cache = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
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
    from plimsoll.embeddings.conversion import require_writable
    from plimsoll.embeddings.wanted_words import WantedWords
    from plimsoll.report.progress import stages

    with answering("taking the vectors", as_json):
        if output is not None:
            require_writable(output, force, [vectors, *([vocabulary] if vocabulary else [])])
        wanted = WantedWords(
            vocabulary, tokenizer, tuple(corpus or ()), tuple(changes or ()), min_count, max_words, padding
        )
        how = {"missing": missing.value, "ignore_case": ignore_case, "precision": precision.value, "seed": seed}
        with stages(quiet or as_json) as progress:
            found = wanted.rows_of(vectors, output, cache, progress, strict=strict, **how)
        _tell(found, output, as_json)


@app.command("info")
def info(
    vectors: _Vectors,
    strict: _Strict = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
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
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
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
        conversion.require_writable(output, force, [vectors])
        with stages(quiet or as_json) as progress:
            done = conversion.convert(vectors, output, precision.value, strict, progress)
        _tell(done, output, as_json)


def _tell(record: Record, output: Path | None, as_json: bool) -> None:
    """Print the record; with an output its path, and the tables on standard error."""
    from plimsoll.cli.answer import show_record
    from plimsoll.cli.output import show
    from plimsoll.report.render import render

    if output is not None and not as_json:
        print(render(record), end="", file=sys.stderr)
        show(str(output))
    else:
        show_record(record, as_json)
