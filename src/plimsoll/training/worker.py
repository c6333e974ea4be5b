"""The training process and the preparing process: what they do between their start and the loop."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from plimsoll.device.cpu.cgroup import oom_kill_count
from plimsoll.errors import EmbeddingError
from plimsoll.files.addresses import without_secrets
from plimsoll.files.child_processes import begin_worker, parent_that_watches
from plimsoll.files.temporary import remove_leftovers, share_a_folder_with_children
from plimsoll.files.timings import timed
from plimsoll.planning.baseline import load_libraries
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan
from plimsoll.records.units import format_bytes
from plimsoll.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from plimsoll.device.base import Backend
    from plimsoll.distributed.ranks import Ranks
    from plimsoll.records.prepared import Prepared
    from plimsoll.records.run import GradientReach

P = ParamSpec("P")


# long: what a preparation does, in its order, with the imports it needs
def prepare_run(  # noqa: PLR0917 -- of a command
    path: Path,
    cache: Path,
    quiet: bool,
    again: bool = False,
    pins: tuple[str, ...] = (),
    forbids: tuple[str, ...] = (),
    tokenizer_budget_bytes: int | None = None,
) -> None:
    """Index the text, make the tokenizer and tokenize, with progress on standard error.

    What the job says wrongly of model and optimizer is found before that, which may take hours, a budget of more than
    there is, and what is pinned or forbidden and cannot be; what the data turn out to be too little for, or to have
    otherwise than a plan that was given, before anything is planned. With ``again`` the run has been prepared already,
    and must come to the same data. With ``tokenizer_budget_bytes`` the tokenizer is made before anything else, and
    before torch is loaded.

    Raises:
        TokenizerMemoryError: if the budget has no room to train the tokenizer.
    """
    from plimsoll.data.pipeline import TOKENIZER, Pipeline
    from plimsoll.data.prepare import prepare, prepare_again
    from plimsoll.device.cpu.heap import trim
    from plimsoll.device.process import PeakCounter, private_bytes
    from plimsoll.records.prepared import Prepared
    from plimsoll.report.progress import spinner, stages

    directory = RunDirectory(path)
    job, peak, made_bytes = _job_of(directory), PeakCounter(), 0
    if tokenizer_budget_bytes is not None:
        peak.reset()
        with stages(quiet) as progress:
            Pipeline(job, cache, progress, tokenizer_budget_bytes).run(TOKENIZER)
        trim()
        made_bytes = peak.read(private_bytes())

    from plimsoll.data.datasets import open_datasets, with_rows
    from plimsoll.data.sketch import texts_of
    from plimsoll.models.assemble import loader_of, prepare_vectors
    from plimsoll.planning.facts import require_prepared_for
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
        loader_of(job, open_datasets(prepared, job)[0]).close()  # what is too little for a batch, is before a plan
        if job.distill is not None:
            require_teacher(job, prepared, prepared.label_names)
            require_tokens(job, Path(prepared.tokenizer_folder))
        vectors = prepare_vectors(job, prepared, cache, progress)
    if vectors is not None:
        _require_same(vectors.digest, directory, again)
        prepared = prepared.model_copy(update={"vectors_folder": vectors.folder, "vectors_digest": vectors.digest})
    peak_bytes = max(peak.read(private_bytes()), made_bytes)
    prepared = with_rows(prepared, job).model_copy(update={"peak_bytes": peak_bytes})
    if not again:
        require_prepared_for(Plan.load(directory.plan), texts_of(prepared))
    prepared.save(directory.prepared)
    if not quiet:
        print(
            data_sentence(prepared, budget_bytes), *([vectors.sentence] if vectors else []), sep="\n", file=sys.stderr
        )


def _check(job: Job, pins: tuple[str, ...], forbids: tuple[str, ...]) -> None:
    """Refuse what the job says wrongly of model and optimizer, and what is asked for and cannot be."""
    from plimsoll.models.assemble import require_buildable
    from plimsoll.planning.targets import require_budget
    from plimsoll.planning.teacher_loss import require_folder
    from plimsoll.records.plan import parse_pin

    require_buildable(job)
    require_folder(job)
    require_budget(job)
    if pins or forbids or job.pin:
        from plimsoll.planning.constraints import require_possible

        require_possible(job, [parse_pin(pin) for pin in pins], forbids)


def _job_of(directory: RunDirectory) -> Job:
    job = Job.from_yaml(directory.job)
    leave_out_unused(job)
    return job


def _require_same(digest: str, directory: RunDirectory, again: bool) -> None:
    from plimsoll.records.prepared import Prepared

    before = Prepared.load(directory.prepared).vectors_digest if again else digest
    if digest != before:
        raise EmbeddingError(
            f"the word vectors of this run (then {before}) are not what they were: put the file back as it was, or "
            "start anew in another --out"
        )


def data_sentence(prepared: Prepared, budget_bytes: int | None = None) -> str:
    """Say in a line what a job is trained on, and what of its texts is not; and what preparing took."""
    from plimsoll.data.samples.tags import entity_note

    train = prepared.train
    parts = [f"{train.num_documents:,} texts", f"{train.num_samples:,} samples"]
    if train.num_tokens:
        parts.insert(1, f"{train.num_tokens:,} tokens")
    if prepared.label_names:
        parts.append(f"{len(prepared.label_names)} {'tags' if train.labels_folder is None else 'classes'}")
    if train.num_long_texts:
        cut = f"{train.num_dropped_tokens:,} tokens of them dropped" if train.num_truncated else "cut into windows"
        parts.append(f"{train.num_long_texts:,} texts longer than a sample, {cut}")
    if train.num_lost_words:
        parts.append(f"{train.num_lost_words:,} words without a token, whose tags are not learnt")
    if train.num_cut_inside:
        parts.append(f"{train.num_cut_inside:,} windows that end at no border")
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
    """Say what is held out, and what of it is not."""
    from plimsoll.data.text.held_out import said_of_repeated

    if prepared.num_held_out_texts:
        texts = "text is" if prepared.num_held_out_texts == 1 else "texts are"
        yield f"{prepared.num_held_out_texts:,} {texts} held out"
    elif prepared.holds_out_windows:
        yield "there is one text, so windows of it are held out and the others trained on"
    yield from said_of_repeated(prepared.num_trained_on)


def plan_run(  # noqa: PLR0917 -- of a command
    path: Path,
    given: Path | None,
    pins: tuple[str, ...],
    forbids: tuple[str, ...],
    quiet: bool,
    goes_on: bool = False,
    from_step: int | None = None,
    keep: bool = False,
) -> None:
    """Make the plan of a run directory, or take one from a file.

    Args:
        path: the run directory, with its ``job.yaml``; the budget of a plan that is given is written into it.
        given: a plan made before; it must be of this job.
        pins: see `plimsoll.records.plan.parse_pin`.
        forbids: names of techniques.
        quiet: show nothing on standard error.
        goes_on: the run goes on from a checkpoint, which is looked for first.
        from_step: the step of that checkpoint; ``None`` for the newest.
        keep: with ``goes_on``, the plan that is there stays unless it is of something else by now.

    Raises:
        BudgetError: if nothing fits the budget; it says what would.
        CheckpointError: if there is no such checkpoint, or it is torn or of another job.
        InputError: if the plan that is given is of something else, or the pins contradict each other.
    """
    from plimsoll.report.plan_sheets import headline
    from plimsoll.report.progress import spinner

    begin_worker()
    directory = RunDirectory(path)
    job = _job_of(directory)
    if goes_on:
        _require_checkpoint(directory, job, from_step)
        if keep and _is_still_good(directory, job, quiet):
            return
    with spinner(quiet) as progress:
        plan = _made(directory, job, pins, forbids, progress) if given is None else _given(directory, job, given)
    plan.save(directory.plan)
    for pin, reason in plan.left_out.items():
        print(f"what is pinned is left out: {pin}: {reason}", file=sys.stderr)
    if not quiet:
        print(f"plan: {' + '.join(map(str, plan.fallbacks[0].choices))}. {headline(plan)}", file=sys.stderr)


def _made(
    directory: RunDirectory, job: Job, pins: tuple[str, ...], forbids: tuple[str, ...], progress: Callable[[str], None]
) -> Plan:
    from plimsoll.data.sketch import texts_of
    from plimsoll.planning.calibration import known_calibration
    from plimsoll.planning.given_plan import require_that_fits
    from plimsoll.planning.kept_answers import plan_of
    from plimsoll.records.plan import parse_pin
    from plimsoll.records.prepared import Prepared

    plan, _ = plan_of(
        job,
        pins=[parse_pin(pin) for pin in pins],
        forbids=forbids,
        calibration=known_calibration(),
        progress=progress,
        texts=texts_of(Prepared.load(directory.prepared)),
    )
    require_that_fits(plan)
    return plan


def _given(directory: RunDirectory, job: Job, path: Path) -> Plan:
    """The plan of a file, whose budget is the job's from now on."""
    from plimsoll.planning.given_plan import require_same, without_trial

    plan = without_trial(Plan.load(path))
    directory.write_job(require_same(plan, job, str(path)))
    return plan


def _require_checkpoint(directory: RunDirectory, job: Job, from_step: int | None) -> None:
    """Refuse what the training process would refuse, before the plan is made, which takes longer."""
    from plimsoll.models.assemble import fingerprint
    from plimsoll.records.prepared import Prepared
    from plimsoll.training import checkpoint

    checkpoint.load(directory.checkpoints, fingerprint(job, Prepared.load(directory.prepared)), from_step)


def _is_still_good(directory: RunDirectory, job: Job, quiet: bool) -> bool:
    """Whether the plan of a run that goes on is for its budget and of its code; says what differs."""
    from plimsoll.data.sketch import texts_of
    from plimsoll.planning.given_plan import reasons_against
    from plimsoll.records.prepared import Prepared

    reasons = reasons_against(Plan.load(directory.plan), job, texts_of(Prepared.load(directory.prepared)))
    if reasons and not quiet:
        print(f"the plan of this run no longer holds: {'; '.join(reasons)}; planning again", file=sys.stderr)
    return not reasons


def _able_to_begin_anew(work: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from plimsoll.device.base import backend_for
        from plimsoll.training.ranks import outside_of_steps

        outside_of_steps(lambda: work(*args, **kwargs), backend_for("cpu"))

    return run


# long: what a start does, in its order, with the imports it needs
@_able_to_begin_anew
def train_run(  # noqa: PLR0912, PLR0915 -- as above
    path: Path,
    *,
    resume: bool,
    from_step: int | None,
    resume_newest: bool,
    fallback: int | None,
    too_large_fallback: int | None,
    restarts: int,
    quiet: bool,
    trial: bool = True,
    ranks: Ranks | None = None,
) -> None:
    """Train the job of a run directory, from the start or from a checkpoint, inside its budget.

    Args:
        path: the run directory.
        resume: go on from a checkpoint, which must exist.
        from_step: the step of that checkpoint; ``None`` for the newest.
        resume_newest: go on from the newest good checkpoint if there is one (after a death).
        fallback: of the plan, to begin with after a death; ``None`` for the first, or the checkpoint's.
        too_large_fallback: with ``fallback``, one that is known to kill and not to be taken again.
        restarts: how often the training process was killed before.
        quiet: show nothing on standard error.
        trial: run the plan's candidates for a few passes first, where that is worth it (`plimsoll.planning.trial`).
        ranks: who trains it together; ``None``: this process alone.

    Raises:
        OutOfMemoryError: also where memory ran out outside of the steps, in what cannot be done again here.
    """
    import torch

    from plimsoll.data.tokens.tokenizer import export_tokenizer
    from plimsoll.device.base import backend_for
    from plimsoll.device.busy import OtherPrograms
    from plimsoll.device.probe import versions
    from plimsoll.distributed.ranks import Ranks
    from plimsoll.models.assemble import assemble, choose_device, fingerprint, require_memory
    from plimsoll.models.build import build_model
    from plimsoll.planning.calibration import learn
    from plimsoll.planning.teacher_loss import loss_for, sketched_loss, teacher_of
    from plimsoll.planning.trial import try_before_training
    from plimsoll.records.prepared import Prepared
    from plimsoll.records.run import RunHead
    from plimsoll.report.progress import spinner, stages
    from plimsoll.step.failpoints import arm_from_environment
    from plimsoll.step.job_step import step_of
    from plimsoll.step.oom_boundary import fitting
    from plimsoll.techniques.allocator import set_up_as_with as set_up_allocator_as_with
    from plimsoll.techniques.heap import set_up_as_with as set_up_heap_as_with
    from plimsoll.techniques.heap import set_up_for_steps
    from plimsoll.techniques.layer_streaming import put_where_needed
    from plimsoll.techniques.parameter_offload import builds_in_files
    from plimsoll.training import checkpoint
    from plimsoll.training.loop import Training, begin_after, train
    from plimsoll.training.loop import resume as go_on
    from plimsoll.training.monitor import MemorySampler, View
    from plimsoll.training.ranks import chosen, device_of_rank, require_same, seed_rank
    from plimsoll.training.teacher_cache import prepare_teacher_cache

    begin_worker()
    others = OtherPrograms(parent_that_watches())
    arm_from_environment()
    remove_leftovers()
    share_a_folder_with_children()
    ranks = ranks or Ranks()
    is_first = ranks.rank == 0
    directory, quiet = RunDirectory.open(path, writes=is_first), quiet or not is_first
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(directory.locked())
        job, prepared, plan = Job.from_yaml(directory.job), Prepared.load(directory.prepared), Plan.load(directory.plan)
        require_same(ranks, directory, job)
        device = device_of_rank(choose_device(job), ranks)
        backend = backend_for(device)
        marks = fingerprint(job, prepared)
        newest = checkpoint.newest_good(directory.checkpoints, marks) if resume_newest and is_first else None
        saved = checkpoint.load(directory.checkpoints, marks, from_step) if resume and is_first else newest
        saved = chosen(ranks, saved, directory.checkpoints, marks)
        load_libraries(job)
        head = RunHead(
            job=without_secrets(job.model_dump(mode="json")), device=backend.probe(), versions=versions(),
            fingerprint=marks, gradient_reach=_gradient_reach(job, prepared, plan),
            preparation_bytes=prepared.peak_bytes,
        )  # fmt: skip
        if job.budget.device_bytes is not None and plan.limit_bytes is None:  # a plan knows better what there will be
            require_memory(job, prepared, backend.baseline_bytes, job.budget.device_bytes)
        if is_first:
            head.save(directory.head)  # before the limit: the supervisor judges a death by it
        host = backend_for("cpu") if device != "cpu" else None
        # What is imported and started inside a limit counts against it with all the address space it asks for.
        sketched = build_model(
            job, prepared.vocab_size, prepared.num_labels, prepared.end_id, prepared.pad_id, device="meta"
        )
        sketched_loss(job, prepared, sketched)
        (host or backend).baseline_bytes()
        _limit(stack, backend, job.budget.device_bytes)
        _limit(stack, host, job.budget.host_bytes)
        last_fallback = directory.fallback_in_force() if saved is not None and fallback is None else fallback
        first = plan.fallbacks[min(last_fallback or 0, len(plan.fallbacks) - 1)].choices
        set_up = set_up_heap_as_with if device == "cpu" else set_up_allocator_as_with
        set_up(first)
        with stages(quiet) as progress:
            ranks.on_first(
                "taught",
                lambda: prepare_teacher_cache(
                    job, prepared, lambda: teacher_of(job, prepared, device), backend, progress
                ),
            )
        view = View(path.name, job.steps, "samples" if job.task == "classification" else "tokens", quiet)
        with spinner(quiet, "building the model"):
            parts = fitting(
                lambda: assemble(
                    job, prepared, device, view.say, _oom_kills, in_files=device == "cpu" and builds_in_files(first),
                    put=lambda model, device: put_where_needed(model, device, first), ranks=ranks,
                ),
                backend, "building the model",
            )  # fmt: skip
        stack.callback(parts.loader.close)
        loss = fitting(lambda: loss_for(job, prepared, device), backend, "loading the teacher")
        if saved is None:  # before a technique shares the parameters out
            ranks.broadcast([*parts.model.parameters(), *parts.model.buffers()])
        if is_first and (said := others.sentence(torch.get_num_threads())):
            view.say(said)
        step = step_of(
            job, parts.model, parts.optimizer, plan.fallbacks, loss=loss, schedule=parts.schedule,
            full_length=prepared.longest_row, files=parts.files, ranks=ranks,
        )  # fmt: skip
        if device == "cpu":
            set_up_for_steps(first)
        is_tried = trial and saved is None and not restarts and ranks.is_alone
        if is_tried:
            plan = try_before_training(step, plan, parts.loader, directory.plan, num_steps=job.steps, quiet=quiet)
        offset_seconds = max((line.time_seconds for line in directory.each_line()), default=0.0)
        training = Training(job, parts, step, directory, marks, MemorySampler(step.backend, offset_seconds), view, host)
        if saved is not None:
            step.load_state_dict(saved.progress["training_step"])
        if fallback is not None:
            step.begin_again_at(fallback, too_large_fallback)
        if saved is not None:
            fitting(lambda: go_on(training, saved), backend, "reading the checkpoint")
        else:
            begin_after(training, 0)  # of a process that died before its first checkpoint, or whose are all torn
            seed_rank(job.seed, ranks)
        with timed("training"):
            record = train(training, restarts)
        if num_truncated := parts.samples.num_truncated:
            view.say(f"{num_truncated:,} texts were truncated to {job.sequence_length} tokens as they were read")
        if is_first:
            if record is not None:
                learn(plan, record.steps, begun_at=record.starts[-1].step)
            export_tokenizer(Path(prepared.tokenizer_folder), directory.model)


def _gradient_reach(job: Job, prepared: Prepared, plan: Plan) -> GradientReach | None:
    """How far back gradients reach, where that is less than the sample: in streams, and in truncated segments."""
    from plimsoll.data.prepare import reach_of
    from plimsoll.data.samples.stream_slots import truncated_reach
    from plimsoll.techniques.mechanisms.recurrent_layers import Cut
    from plimsoll.techniques.truncated_bptt import TruncatedBptt

    num_read = job.sequence_length - 1
    for choice in plan.fallbacks[0].choices:
        if choice.technique == TruncatedBptt.name:
            _, segment_steps = Cut(int(choice.options["steps"])).spans(num_read)[0]
            if prepared.gradient_reach is not None:
                return reach_of(job, prepared.train, prepared.validation, segment_steps)
            return truncated_reach(num_read, segment_steps)
    return prepared.gradient_reach


def _oom_kills() -> int | None:
    kills = oom_kill_count()
    return None if kills is None else kills.number


def _limit(stack: ExitStack, backend: Backend | None, limit_bytes: int | None) -> None:
    if backend is not None and limit_bytes is not None:
        stack.enter_context(backend.limited(limit_bytes))
