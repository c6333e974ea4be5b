"""``plimsoll data``: a corpus indexed, tokenized, looked at, and timed, with a job file or with the texts themselves.

Texts are given as files, folders, patterns or ``hf:NAME``; everything else is a field of the job, changed by ``--set``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli.options import AsJsonAlone, Cache, Force, Quiet

if TYPE_CHECKING:
    from plimsoll.records.corpus import CorpusFacts, FeedRates, Inspection, TokenFacts
    from plimsoll.records.job import Job
    from plimsoll.report.data_sheets import Found
    from plimsoll.report.progress import Report

    Work = Callable[[Job, Path, Report], Found]

app = typer.Typer(no_args_is_help=True, help="Text larger than memory: index it, tokenize it, look at it, time it.")

_Texts = Annotated[list[str], typer.Argument(metavar="JOB|TEXTS...", help="A job file, or files, folders, patterns.")]
_Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job: data.unit=line.")
]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write a page (.html) or the record (.json).")]


def _command(what: str) -> Callable[[Work], Work]:
    """Make a command of a function, whose docstring is the help; Ctrl-C says that it stopped ``what``."""

    def made(work: Work) -> Work:
        @app.command(work.__name__, help=work.__doc__)
        def command(  # noqa: PLR0917 -- typer calls it by name
            texts: _Texts,
            changes: _Changes = None,
            cache: Cache = None,
            output: _Output = None,
            force: Force = False,
            quiet: Quiet = False,
            as_json: AsJsonAlone = False,
        ) -> None:
            from plimsoll.cli.answer import answering, check_output, hand_over
            from plimsoll.records.base import cache_folder
            from plimsoll.records.job import Job
            from plimsoll.report.data_sheets import headline
            from plimsoll.report.progress import stages

            with answering(what, as_json):
                with stages(quiet or as_json) as progress:
                    job = Job.from_file_or_texts(texts, tuple(changes or ()))
                    check_output(output, force)
                    found = work(job, cache or cache_folder() / "data", progress)
                hand_over(found, headline(found), output, as_json)

        return work

    return made


@_command("indexing")
def index(job: Job, cache: Path, progress: Report) -> CorpusFacts:
    """Find every text, so that any of them is read in microseconds; nothing is copied.

    \b
    Examples:
      plimsoll data index corpus/*.txt --set data.unit=line
      plimsoll data index reviews.jsonl.gz --set data.text=body --set data.on_error=skip
      plimsoll data index job.yaml --json
    """
    from plimsoll.data.inspect import index_corpus

    return index_corpus(job, cache, progress)


@_command("tokenizing")
def tokenize(job: Job, cache: Path, progress: Report) -> TokenFacts:
    """Tokenize a corpus once, on all cores; after Ctrl-C or a full disk the same command goes on.

    \b
    Examples:
      plimsoll data tokenize job.yaml --cache tokens      then: plimsoll train job.yaml --cache tokens
      plimsoll data tokenize corpus --set tokenizer=path/to/tokenizer
      plimsoll data tokenize corpus --set tokenizer.vocab_size=32000 --cache tokens
    """
    from plimsoll.data.inspect import tokenize_corpus

    return tokenize_corpus(job, cache, progress)


@_command("the inspection")
def inspect(job: Job, cache: Path, progress: Report) -> Inspection:
    """Show how long the texts are, and what of a batch would be padding with each way to make samples of them.

    \b
    Examples:
      plimsoll data inspect job.yaml
      plimsoll data inspect reviews.csv --set task=classification --set data.label=stars
      plimsoll data inspect corpus --set sequence_length=1024 -o corpus.html
    """
    from plimsoll.data.inspect import inspect_corpus

    return inspect_corpus(job, cache, progress)


@_command("the timing")
def bench(job: Job, cache: Path, progress: Report) -> FeedRates:
    """Time how fast this machine reads, tokenizes and feeds a corpus, and the memory it takes.

    \b
    Examples:
      plimsoll data bench job.yaml
      plimsoll data bench corpus --set data.workers=2 --json
    """
    from plimsoll.training.feed_speed import time_corpus

    return time_corpus(job, cache, progress)
