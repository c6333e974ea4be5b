"""``plimsoll data``: commands that index, tokenize, inspect and time a corpus, given by a job file or by its texts.

Texts are files, folders, patterns or ``hf:NAME``. All other settings are fields of the job, changed with ``--set``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Changes, Command, Force, Output, Quiet

if TYPE_CHECKING:
    from plimsoll.records.corpus import CorpusFacts, FeedRates, Inspection, TokenFacts
    from plimsoll.records.job import Job
    from plimsoll.report.data_sheets import Found
    from plimsoll.report.progress import Report

    Work = Callable[[Job, Path, Report], Found]

app = typer.Typer(no_args_is_help=True, help="Index, tokenize, inspect and benchmark large text corpora.")

_Texts = Annotated[
    list[str], typer.Argument(metavar="JOB|TEXTS", help="Job file, or text files, folders and patterns.")
]


def _command(what: str) -> Callable[[Work], Work]:
    """Return a decorator that makes a function a subcommand of ``plimsoll data``, with its docstring as help.

    ``what`` is a noun for the command's computation in the message after Ctrl-C.
    """

    def made(work: Work) -> Work:
        @app.command(work.__name__, help=work.__doc__, cls=Command)
        def command(  # noqa: PLR0917 -- typer calls it by name
            texts: _Texts,
            changes: Changes = None,
            cache: Annotated[Path | None, options.cache("your cache folder")] = None,
            output: Output = None,
            force: Force = False,
            quiet: Quiet = False,
            as_json: AsJson = False,
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
    """Index every text for random access; nothing is copied.

    \b
    Examples:
      plimsoll data index job.yaml
      plimsoll data index corpus/*.txt --set data.unit=line
      plimsoll data index reviews.jsonl.gz --set data.text=body
    """
    from plimsoll.data.inspect import index_corpus

    return index_corpus(job, cache, progress)


@_command("tokenizing")
def tokenize(job: Job, cache: Path, progress: Report) -> TokenFacts:
    """Tokenize a corpus once, on all cores.

    To continue after Ctrl-C or a full disk, run the same command again.

    \b
    Examples:
      plimsoll data tokenize job.yaml --cache tokens
      plimsoll train job.yaml --cache tokens
      plimsoll data tokenize corpus --set tokenizer=path/to/tokenizer
      plimsoll data tokenize corpus --set tokenizer.vocab_size=32000
    """
    from plimsoll.data.inspect import tokenize_corpus

    return tokenize_corpus(job, cache, progress)


@_command("inspection")
def inspect(job: Job, cache: Path, progress: Report) -> Inspection:
    """Show text lengths, padding of each sampling method, and faults.

    \b
    Examples:
      plimsoll data inspect job.yaml
      plimsoll data inspect corpus --set sequence_length=1024
      plimsoll data inspect corpus -o corpus.html
    """
    from plimsoll.data.inspect import inspect_corpus

    return inspect_corpus(job, cache, progress)


@_command("timing")
def bench(job: Job, cache: Path, progress: Report) -> FeedRates:
    """Measure how fast this machine reads, tokenizes and feeds text.

    The memory that this needs is measured too.

    \b
    Examples:
      plimsoll data bench job.yaml
      plimsoll data bench corpus --set data.workers=2 --json
    """
    from plimsoll.training.feed_speed import time_corpus

    return time_corpus(job, cache, progress)
