"""The process that prepares the data of a run: it checks the job, trains the tokenizer, indexes and tokenizes texts.

This module does not import torch at the top. If training the tokenizer does not fit the budget together with torch, the
tokenizer is trained before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from plimsoll.data.pipeline import TOKENIZER, Pipeline
from plimsoll.data.prepare import prepare, prepare_again
from plimsoll.data.quick_facts import texts_of
from plimsoll.data.samples.tags import entity_note
from plimsoll.data.text.held_out import said_of_repeated
from plimsoll.device.cpu.heap import trim
from plimsoll.device.process import PeakCounter, private_bytes
from plimsoll.errors import EmbeddingError, TokenizerMemoryError
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.processes.children import begin_worker
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan, parse_pin
from plimsoll.records.prepared import Prepared
from plimsoll.records.units import format_bytes
from plimsoll.report.progress import spinner, stages
from plimsoll.training.run_directory import RunDirectory


def prepare_or_restart(  # noqa: PLR0917 -- of a command
    path: Path,
    cache: Path,
    quiet: bool,
    again: bool,
    pins: tuple[str, ...],
    forbids: tuple[str, ...],
    tokenizer_budget_bytes: int | None,
) -> None:
    """Prepare the data of a run directory (see `prepare_run`), restarting this process if memory is short.

    Checking the job loads torch. If that leaves too little of the budget to train the tokenizer, the process restarts
    and trains the tokenizer before it loads torch.

    Raises:
        TokenizerMemoryError: if training the tokenizer does not fit the budget even without torch.
    """
    try:
        prepare_run(path, cache, quiet, again, pins, forbids, tokenizer_budget_bytes)
    except TokenizerMemoryError as error:
        if tokenizer_budget_bytes is not None or error.budget_bytes is None:
            raise
        os.execv(
            sys.executable,
            [sys.executable, "-m", "plimsoll", *sys.argv[1:], "--tokenizer-budget-bytes", str(error.budget_bytes)],
        )


# long: the phases of a preparation, in their order
def prepare_run(  # noqa: PLR0917 -- of a command
    path: Path,
    cache: Path,
    quiet: bool,
    again: bool = False,
    pins: tuple[str, ...] = (),
    forbids: tuple[str, ...] = (),
    tokenizer_budget_bytes: int | None = None,
) -> None:
    """Check the job, index the texts, train the tokenizer and tokenize, with progress on standard error.

    The preparation may take hours, so errors in the job, the budget and the constraints are found first. Data that have
    too few samples for a batch, or do not match a given plan, are refused before planning.

    Args:
        path: the run directory.
        cache: folder for the tokens.
        quiet: show no progress.
        again: the run was prepared before, and the data must be the same as then.
        pins: pinned choices. They are only checked.
        forbids: forbidden techniques. They are only checked.
        tokenizer_budget_bytes: train the tokenizer first, inside this budget and before torch is imported; ``None`` to
            train it together with the other steps.

    Raises:
        TokenizerMemoryError: if training the tokenizer does not fit the budget.
    """
    directory = RunDirectory(path)
    job, peak, made_bytes = Job.from_yaml(directory.job), PeakCounter(), 0
    leave_out_unused(job)
    if tokenizer_budget_bytes is not None:
        peak.reset()
        with stages(quiet) as progress:
            Pipeline(job, cache, progress, tokenizer_budget_bytes).run(TOKENIZER)
        trim()
        made_bytes = peak.read(private_bytes())

    from plimsoll.data.datasets import open_datasets, with_rows
    from plimsoll.models.assemble import loader_of, prepare_vectors
    from plimsoll.planning.plan_validity import require_prepared_for
    from plimsoll.planning.targets import private_budget_bytes
    from plimsoll.planning.teacher_loss import require_teacher, require_tokens

    begin_worker()
    with spinner(quiet, "checking the job"):
        _check(job, pins, forbids)
    budget_bytes = private_budget_bytes(job)
    peak.reset()
    with stages(quiet) as progress:
        if again:
            prepared = prepare_again(job, Prepared.load(directory.prepared), cache, progress, budget_bytes)
        else:
            prepared = prepare(job, cache, progress, budget_bytes)
        loader_of(job, open_datasets(prepared, job)[0]).close()  # raises if the data are too few for a batch
        if job.distill is not None:
            require_teacher(job, prepared, prepared.label_names)
            require_tokens(job, Path(prepared.tokenizer_folder))
        vectors = prepare_vectors(job, prepared, cache, progress)
    if vectors is not None:
        _require_same(vectors.digest, directory, again)
        prepared = prepared.model_copy(update={"vectors_folder": vectors.folder, "vectors_digest": vectors.digest})
    peak_bytes = max(peak.read(private_bytes()), made_bytes)
    prepared = with_rows(prepared, job).model_copy(update={"peak_bytes": peak_bytes})
    if not again and directory.plan.is_file():  # the data of `plimsoll shrink` is prepared without a plan
        require_prepared_for(Plan.load(directory.plan), texts_of(prepared))
    prepared.save(directory.prepared)
    if not quiet:
        print(
            data_sentence(prepared, budget_bytes), *([vectors.sentence] if vectors else []), sep="\n", file=sys.stderr
        )


def _check(job: Job, pins: tuple[str, ...], forbids: tuple[str, ...]) -> None:
    """Raise if model, optimizer, budget or constraints of the job are invalid."""
    from plimsoll.models.assemble import require_buildable
    from plimsoll.planning.inputs import allowed
    from plimsoll.planning.targets import require_budget
    from plimsoll.planning.teacher_loss import require_folder

    require_buildable(job)
    if job.allow:
        allowed(job.allow)
    require_folder(job)
    require_budget(job)
    if pins or forbids or job.pin:
        from plimsoll.planning.constraints import require_possible

        require_possible(job, [parse_pin(pin) for pin in pins], forbids)


def _require_same(digest: str, directory: RunDirectory, again: bool) -> None:
    before = Prepared.load(directory.prepared).vectors_digest if again else digest
    if digest != before:
        raise EmbeddingError(
            f"the word vectors of this run (then {before}) have changed: restore the original file, or "
            "start a new run in another --out"
        )


def data_sentence(prepared: Prepared, budget_bytes: int | None = None) -> str:
    """Return a line that describes the training data, the texts left out, and the memory that preparing took.

    Args:
        prepared: the prepared data.
        budget_bytes: private memory that preparing may use, in bytes; ``None`` without a limit.
    """
    train = prepared.train
    parts = [f"{train.num_documents:,} texts", f"{train.num_samples:,} samples"]
    if train.num_tokens:
        parts.insert(1, f"{train.num_tokens:,} tokens")
    if prepared.label_names:
        parts.append(f"{len(prepared.label_names)} {'tags' if train.labels_folder is None else 'classes'}")
    if train.num_long_texts:
        cut = f"{train.num_dropped_tokens:,} of their tokens dropped" if train.num_truncated else "cut into windows"
        parts.append(f"{train.num_long_texts:,} texts longer than a sample, {cut}")
    if train.num_lost_words:
        parts.append(f"{train.num_lost_words:,} words without a token, whose tags are ignored")
    if train.num_cut_inside:
        parts.append(f"{train.num_cut_inside:,} windows that do not end at a border")
    if prepared.gradient_reach is not None:
        reach = prepared.gradient_reach
        parts.append(f"gradients reach back {reach.mean_tokens:,.1f} tokens on average, {reach.most_tokens:,} at most")
    note = entity_note(prepared.label_names) if train.labels_folder is None else None
    if note is not None:
        parts.append(note)
    if prepared.num_left_out_words:
        parts.append(f"the tokenizer is trained without {prepared.num_left_out_words:,} of the rarest words")
    if prepared.peak_bytes is not None:
        is_more = budget_bytes is not None and prepared.peak_bytes > budget_bytes
        parts.append(f"preparing took {format_bytes(prepared.peak_bytes)}{', more than the budget' if is_more else ''}")
    parts += _held_out(prepared)
    if prepared.special_tokens is not None:
        parts.append(f"each text is {prepared.special_tokens}")
    if train.num_skipped:
        parts.append(f"{train.num_skipped:,} files or rows left out, the first: {train.skipped[0]}")
    return f"data: {'; '.join(parts)}"


def _held_out(prepared: Prepared) -> Iterator[str]:
    """Yield the parts of the data sentence that describe the held-out texts."""
    if prepared.num_held_out_texts:
        texts = "text is" if prepared.num_held_out_texts == 1 else "texts are"
        yield f"{prepared.num_held_out_texts:,} {texts} held out"
    elif prepared.holds_out_windows:
        yield "there is only one text, so some of its windows are held out"
    yield from said_of_repeated(prepared.num_trained_on)
