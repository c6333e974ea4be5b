"""``plimsoll data``: a corpus indexed, tokenized, looked at, and timed, with a job file or with the texts themselves.

Texts are given as files, folders, patterns or ``hf:NAME``; everything else is a field of the job, changed by ``--set``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plimsoll.cli.options import Quiet

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
_Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables; no progress.")]


@app.command("index")
def index(  # noqa: PLR0917 -- typer calls it by name
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: _Force = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Find every text, so that any of them is read in microseconds; nothing is copied.

    \b
    Examples:
      plimsoll data index corpus/*.txt --set data.unit=line
      plimsoll data index reviews.jsonl.gz --set data.text=body --set data.on_error=skip
      plimsoll data index job.yaml --json
    """

    def work(job: Job, cache: Path, progress: Report) -> Any:
        from plimsoll.data.inspect import index_corpus

        return index_corpus(job, cache, progress)

    _answer(
        "indexing",
        work,
        lambda found: f"{found.num_texts:,} texts",
        texts,
        changes,
        cache,
        output,
        force,
        quiet,
        as_json,
    )


@app.command("tokenize")
def tokenize(  # noqa: PLR0917 -- as above
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: _Force = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Tokenize a corpus once, on all cores; after Ctrl-C or a full disk the same command goes on.

    \b
    Examples:
      plimsoll data tokenize job.yaml --cache tokens      then: plimsoll train job.yaml --cache tokens
      plimsoll data tokenize corpus --set tokenizer=path/to/tokenizer
      plimsoll data tokenize corpus --set tokenizer.vocab_size=32000 --cache tokens
    """

    def work(job: Job, cache: Path, progress: Report) -> Any:
        from plimsoll.data.inspect import tokenize_corpus

        return tokenize_corpus(job, cache, progress)

    _answer(
        "tokenizing",
        work,
        lambda found: f"{found.num_tokens:,} tokens",
        texts,
        changes,
        cache,
        output,
        force,
        quiet,
        as_json,
    )


@app.command("inspect")
def inspect(  # noqa: PLR0917 -- as above
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: _Force = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Show how long the texts are, and what of a batch would be padding with each way to make samples of them.

    \b
    Examples:
      plimsoll data inspect job.yaml
      plimsoll data inspect reviews.csv --set task=classification --set data.label=stars
      plimsoll data inspect corpus --set sequence_length=1024 -o corpus.html
    """

    def work(job: Job, cache: Path, progress: Report) -> Any:
        from plimsoll.data.inspect import inspect_corpus

        return inspect_corpus(job, cache, progress)

    _answer(
        "the inspection",
        work,
        lambda found: f"{found.corpus.num_texts:,} texts, {found.num_tokens:,} tokens",
        texts,
        changes,
        cache,
        output,
        force,
        quiet,
        as_json,
    )


@app.command("bench")
def bench(  # noqa: PLR0917 -- as above
    texts: _Texts,
    changes: _Changes = None,
    cache: _Cache = None,
    output: _Output = None,
    force: _Force = False,
    quiet: Quiet = False,
    as_json: _AsJson = False,
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

    _answer(
        "the timing",
        work,
        lambda found: f"{len(found.rates)} rates",
        texts,
        changes,
        cache,
        output,
        force,
        quiet,
        as_json,
    )


def _answer(  # noqa: PLR0917 -- as above
    what: str,
    work: Callable[[Job, Path, Report], Any],
    sentence: Callable[[Any], str],
    texts: list[str],
    changes: list[str] | None,
    cache: Path | None,
    output: Path | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Do the work of a command on the texts and hand its record over; ``sentence`` sums it up."""
    from plimsoll.cli.answer import answering, check_output, hand_over
    from plimsoll.report.progress import stages

    with answering(what, as_json):
        with stages(quiet or as_json) as progress:
            job = job_of(texts, changes)
            check_output(output, force)
            found = work(job, _cache(cache), progress)
        hand_over(found, sentence(found), output, as_json)


def job_of(texts: list[str], changes: list[str] | None) -> Job:
    """Read the job file, or make the job of some texts."""
    from plimsoll.records.job import Job

    if len(texts) == 1 and Path(texts[0]).suffix in {".yaml", ".yml"}:
        return Job.from_yaml(Path(texts[0]), tuple(changes or ()))
    return Job.from_texts(texts, tuple(changes or ()))


def _cache(given: Path | None) -> Path:
    from plimsoll.records.base import cache_folder

    return given or cache_folder() / "data"
