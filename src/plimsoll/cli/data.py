"""``plimsoll data``: a corpus indexed, tokenized, looked at, and timed, with a job file or with the texts themselves.

Texts are given as files, folders, patterns or ``hf:NAME``; everything else is a field of the job, changed by ``--set``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from plimsoll.cli.options import AsJsonAlone, Force, Quiet

if TYPE_CHECKING:
    from plimsoll.records.job import Job
    from plimsoll.report.progress import Report

app = typer.Typer(no_args_is_help=True, help="Text larger than memory: index it, tokenize it, look at it, time it.")

_Texts = Annotated[list[str], typer.Argument(metavar="JOB|TEXTS...", help="A job file, or files, folders, patterns.")]
_Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job: data.unit=line.")
]
_Cache = Annotated[Path | None, typer.Option("--cache", help="Where it is kept. Default: your cache folder.")]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write a page (.html) or the record (.json).")]


@app.command("index")
def index(  # noqa: PLR0917 -- typer calls it by name
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
) -> None:
    """Find every text, so that any of them is read in microseconds; nothing is copied.

    \b
    Examples:
      plimsoll data index corpus/*.txt --set data.unit=line
      plimsoll data index reviews.jsonl.gz --set data.text=body --set data.on_error=skip
      plimsoll data index job.yaml --json
    """
    from plimsoll.data.inspect import index_corpus

    options = _Options(texts, changes, cache, output, force, quiet, as_json)
    _answer("indexing", index_corpus, lambda found: f"{found.num_texts:,} texts", options)


@app.command("tokenize")
def tokenize(  # noqa: PLR0917 -- as above
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
) -> None:
    """Tokenize a corpus once, on all cores; after Ctrl-C or a full disk the same command goes on.

    \b
    Examples:
      plimsoll data tokenize job.yaml --cache tokens      then: plimsoll train job.yaml --cache tokens
      plimsoll data tokenize corpus --set tokenizer=path/to/tokenizer
      plimsoll data tokenize corpus --set tokenizer.vocab_size=32000 --cache tokens
    """
    from plimsoll.data.inspect import tokenize_corpus

    options = _Options(texts, changes, cache, output, force, quiet, as_json)
    _answer("tokenizing", tokenize_corpus, lambda found: f"{found.num_tokens:,} tokens", options)


@app.command("inspect")
def inspect(  # noqa: PLR0917 -- as above
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
) -> None:
    """Show how long the texts are, and what of a batch would be padding with each way to make samples of them.

    \b
    Examples:
      plimsoll data inspect job.yaml
      plimsoll data inspect reviews.csv --set task=classification --set data.label=stars
      plimsoll data inspect corpus --set sequence_length=1024 -o corpus.html
    """
    from plimsoll.data.inspect import inspect_corpus

    options = _Options(texts, changes, cache, output, force, quiet, as_json)
    _answer(
        "the inspection",
        inspect_corpus,
        lambda found: f"{found.corpus.num_texts:,} texts, {found.num_tokens:,} tokens",
        options,
    )


@app.command("bench")
def bench(  # noqa: PLR0917 -- as above
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJsonAlone = False,
) -> None:
    """Time how fast this machine reads, tokenizes and feeds a corpus, and the memory it takes.

    \b
    Examples:
      plimsoll data bench job.yaml
      plimsoll data bench corpus --set data.workers=2 --json
    """

    def work(job: Job, cache: Path, progress: Report) -> Any:
        from plimsoll.training.feed_speed import time_corpus

        return time_corpus(job, cache, progress)

    options = _Options(texts, changes, cache, output, force, quiet, as_json)
    _answer("the timing", work, lambda found: f"{len(found.rates)} rates", options)


class _Options(NamedTuple):
    texts: list[str]
    changes: list[str] | None
    cache: Path | None
    output: Path | None
    force: bool
    quiet: bool
    as_json: bool


def _answer(
    what: str, work: Callable[[Job, Path, Report], Any], sentence: Callable[[Any], str], options: _Options
) -> None:
    """Do the work of a command on the texts and hand its record over; ``sentence`` sums it up."""
    from plimsoll.cli.answer import answering, check_output, hand_over
    from plimsoll.records.base import cache_folder
    from plimsoll.records.job import Job
    from plimsoll.report.progress import stages

    with answering(what, options.as_json):
        with stages(options.quiet or options.as_json) as progress:
            job = Job.from_file_or_texts(options.texts, tuple(options.changes or ()))
            check_output(options.output, options.force)
            found = work(job, options.cache or cache_folder() / "data", progress)
        hand_over(found, sentence(found), options.output, options.as_json)
