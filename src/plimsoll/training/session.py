"""The training process: a `Session` trains the job of a run directory and saves the model.

    Session(path, resume=True).run()    # prepare, plan, limit, build, restore, train

This module imports at the top everything that a training process needs, because imports after `Session.limit` would
count against the budget. `plimsoll.training.baseline` imports this module to measure the memory of a process without a
model. Does NOT prepare data (`plimsoll.training.prepare`) or plan (`plimsoll.training.plan`): separate processes do
that, so that all their memory is freed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from plimsoll.data.prepare import reach_of
from plimsoll.data.samples.stream_slots import truncated_reach
from plimsoll.data.tokens.tokenizer import export_tokenizer
from plimsoll.device.base import Backend, backend_for
from plimsoll.device.busy_cores import OtherPrograms
from plimsoll.device.cpu.cgroup import oom_kill_count
from plimsoll.device.probe import versions
from plimsoll.distributed.ranks import Ranks
from plimsoll.files.addresses import without_secrets
from plimsoll.files.temporary import remove_leftovers, share_a_folder_with_children
from plimsoll.models.assemble import Assembled, assemble, choose_device, fingerprint, require_memory
from plimsoll.models.build import build_model
from plimsoll.planning.baseline import load_libraries
from plimsoll.planning.calibration import learn
from plimsoll.planning.measured_choice import try_before_training
from plimsoll.planning.teacher_loss import loss_for, sketched_loss, teacher_of
from plimsoll.processes.children import begin_worker, parent_that_watches
from plimsoll.processes.timings import timed
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan
from plimsoll.records.prepared import Prepared
from plimsoll.records.run import GradientReach, RunHead
from plimsoll.report.progress import spinner, stages
from plimsoll.step.failpoints import arm_from_environment
from plimsoll.step.job_step import step_of
from plimsoll.step.oom_boundary import fitting
from plimsoll.techniques import Choices, technique_of
from plimsoll.techniques.mechanisms.allocators import set_up_as_with, set_up_for_steps
from plimsoll.techniques.mechanisms.building import builds_outside, put_where_needed
from plimsoll.training import checkpoint, loop
from plimsoll.training.monitor import MemorySampler, View
from plimsoll.training.ranks import chosen, device_of_rank, outside_of_steps, require_same, seed_rank
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.teacher_cache import prepare_teacher_cache


@final
@dataclass
class Session:
    """The training of the job in a run directory, from the start or from a checkpoint, inside its budget.

    Args:
        path: the run directory.
        resume: resume from a checkpoint, which must exist.
        from_step: with ``resume``, the step of the checkpoint; ``None`` for the newest.
        resume_newest: after a death of the training process, resume from the newest good checkpoint, if one exists.
        fallback: after a death, the number of the plan's fallback to start with; ``None`` for the fallback of the
            checkpoint or, without a checkpoint, for the first.
        too_large_fallback: with ``fallback``, the number of the fallback whose process was killed; it is not used
            again.
        restarts: how often the training process has died before.
        quiet: print nothing to standard error.
        trial: run a few passes of each candidate of the plan before training, if that may save time
            (`plimsoll.planning.measured_choice`).
        ranks: ranks that train the model; by default only this process.
    """

    path: Path
    resume: bool = False
    from_step: int | None = None
    resume_newest: bool = False
    fallback: int | None = None
    too_large_fallback: int | None = None
    restarts: int = 0
    quiet: bool = False
    trial: bool = True
    ranks: Ranks = field(default_factory=Ranks)

    # Results of the phases, which later phases use.
    _stack: ExitStack = field(init=False, repr=False)
    _others: OtherPrograms = field(init=False, repr=False)
    _directory: RunDirectory = field(init=False, repr=False)
    _job: Job = field(init=False, repr=False)
    _data: Prepared = field(init=False, repr=False)
    _marks: dict[str, str] = field(init=False, repr=False)
    _saved: checkpoint.Checkpoint | None = field(init=False, repr=False)
    _device: str = field(init=False, repr=False)
    _backend: Backend = field(init=False, repr=False)
    _host: Backend | None = field(init=False, repr=False)
    _plan: Plan = field(init=False, repr=False)
    _first: Choices = field(init=False, repr=False)
    _parts: Assembled = field(init=False, repr=False)
    _training: loop.Training = field(init=False, repr=False)

    def run(self) -> None:
        """Run all phases in order.

        Raises:
            OutOfMemoryError: if memory ran out in a step with every fallback, or outside of the steps.
        """
        outside_of_steps(self._run, backend_for("cpu"))

    def _run(self) -> None:
        begin_worker()
        self._others = OtherPrograms(parent_that_watches())
        arm_from_environment()
        remove_leftovers()
        share_a_folder_with_children()
        with ExitStack() as self._stack:
            self.prepare()
            self.plan()
            self.limit()
            self.build()
            self.restore()
            self.train()

    @property
    def _is_first(self) -> bool:
        return self.ranks.rank == 0

    def prepare(self) -> None:
        """Read the job and its data, choose the device and the checkpoint, and import the libraries."""
        self.quiet = self.quiet or not self._is_first
        self._directory = directory = RunDirectory.open(self.path, writes=self._is_first)
        if self._is_first:
            self._stack.enter_context(directory.locked())
        self._job, self._data = Job.from_yaml(directory.job), Prepared.load(directory.prepared)
        require_same(self.ranks, directory, self._job)
        self._device = device_of_rank(choose_device(self._job), self.ranks)
        self._backend = backend_for(self._device)
        self._host = backend_for("cpu") if self._device != "cpu" else None
        self._marks = fingerprint(self._job, self._data)
        saved = self._checkpoint() if self._is_first else None
        self._saved = chosen(self.ranks, saved, directory.checkpoints, self._marks)
        load_libraries(self._job)

    def _checkpoint(self) -> checkpoint.Checkpoint | None:
        checkpoints = self._directory.checkpoints
        if self.resume:
            return checkpoint.load(checkpoints, self._marks, self.from_step)
        return checkpoint.newest_good(checkpoints, self._marks) if self.resume_newest else None

    def plan(self) -> None:
        """Read the plan, choose its first fallback, and write ``run.json``, which describes the run."""
        job, directory = self._job, self._directory
        self._plan = plan = Plan.load(directory.plan)
        head = RunHead(
            job=without_secrets(job.model_dump(mode="json")),
            device=self._backend.probe(),
            versions=versions(),
            fingerprint=self._marks,
            gradient_reach=_gradient_reach(job, self._data, plan),
            preparation_bytes=self._data.peak_bytes,
        )
        if job.budget.device_bytes is not None and plan.limit_bytes is None:  # a plan predicts the need better
            require_memory(job, self._data, self._backend.baseline_bytes, job.budget.device_bytes)
        if self._is_first:
            head.save(directory.head)  # before the limit, because the supervisor needs it to explain a death
        goes_on_as_before = self._saved is not None and self.fallback is None
        fallback = directory.fallback_in_force() if goes_on_as_before else self.fallback
        self._first = plan.fallbacks[min(fallback or 0, len(plan.fallbacks) - 1)].choices

    def limit(self) -> None:
        """Limit the memory of this process and set up its allocator.

        Before that, it builds the model and the loss once without memory for tensors. The imports and threads that this
        needs must not count against the limit.
        """
        job, data = self._job, self._data
        # Imports and threads that start inside a limit count against it with all the address space that they reserve.
        sketched = build_model(job, data.vocab_size, data.num_labels, data.end_id, data.pad_id, device="meta")
        sketched_loss(job, data, sketched)
        (self._host or self._backend).baseline_bytes()
        for backend, limit_bytes in ((self._backend, job.budget.device_bytes), (self._host, job.budget.host_bytes)):
            if backend is not None and limit_bytes is not None:
                self._stack.enter_context(backend.limited(limit_bytes))
        set_up_as_with(self._first, self._device)

    def build(self) -> None:
        """Build model, optimizer, loader and step, and run the trial of the plan if it may save time."""
        job, data, backend, device = self._job, self._data, self._backend, self._device
        with stages(self.quiet) as progress:
            self.ranks.on_first(
                "teacher cache",
                lambda: prepare_teacher_cache(job, data, lambda: teacher_of(job, data, device), backend, progress),
            )
        unit = "samples" if job.task == "classification" else "tokens"
        view = View(self.path.name, job.steps, unit, self.quiet)
        with spinner(self.quiet, "building the model"):
            self._parts = parts = fitting(lambda: self._assembled(view), backend, "building the model")
        self._stack.callback(parts.loader.close)
        loss = fitting(lambda: loss_for(job, data, device), backend, "loading the teacher")
        if self._saved is None:  # before a technique shards the parameters
            self.ranks.broadcast([*parts.model.parameters(), *parts.model.buffers()])
        if self._is_first and (said := self._others.sentence(torch.get_num_threads())):
            view.say(said)
        step = step_of(
            job,
            parts.model,
            parts.optimizer,
            self._plan.fallbacks,
            loss=loss,
            schedule=parts.schedule,
            full_length=data.longest_row,
            files=parts.files,
            ranks=self.ranks,
        )
        if device == "cpu":
            set_up_for_steps(self._first)
        if self.trial and self._saved is None and not self.restarts and self.ranks.is_alone:
            self._plan = try_before_training(
                step, self._plan, parts.loader, self._directory.plan, num_steps=job.steps, quiet=self.quiet
            )
        offset_seconds = max((line.time_seconds for line in self._directory.each_line()), default=0.0)
        sampler = MemorySampler(step.backend, offset_seconds)
        self._training = loop.Training(job, parts, step, self._directory, self._marks, sampler, view, self._host)

    def _assembled(self, view: View) -> Assembled:
        is_in_files = self._device == "cpu" and builds_outside(self._first, "cpu")
        return assemble(
            self._job,
            self._data,
            self._device,
            view.say,
            _oom_kills,
            in_files=is_in_files,
            put=lambda model, device: put_where_needed(model, device, self._first),
            ranks=self.ranks,
        )

    def restore(self) -> None:
        """Restore the checkpoint, or start from the beginning."""
        training, step, saved = self._training, self._training.step, self._saved
        if saved is not None:
            step.load_state_dict(saved.progress["training_step"])
        if self.fallback is not None:
            step.begin_again_at(self.fallback, self.too_large_fallback)
        if saved is not None:
            fitting(lambda: loop.resume(training, saved), self._backend, "reading the checkpoint")
        else:
            loop.begin_after(training, 0)  # steps of a process without a usable checkpoint
            seed_rank(self._job.seed, self.ranks)

    def train(self) -> None:
        """Train to the last step, calibrate predictions with the measured steps, and export the tokenizer."""
        with timed("training"):
            record = loop.train(self._training, self.restarts)
        if num_truncated := self._parts.samples.num_truncated:
            self._training.view.say(
                f"{num_truncated:,} texts were truncated to {self._job.sequence_length} tokens while they were read"
            )
        if self._is_first:
            if record is not None:
                learn(self._plan, record.steps, begun_at=record.starts[-1].step)
            export_tokenizer(Path(self._data.tokenizer_folder), self._directory.model)


def _gradient_reach(job: Job, prepared: Prepared, plan: Plan) -> GradientReach | None:
    """Return how many earlier tokens gradients reach, if the job reads streams or truncates backpropagation.

    Otherwise return ``None``: gradients reach through whole samples.
    """
    num_read = job.sequence_length - 1
    for choice in plan.fallbacks[0].choices:
        segment_steps = technique_of(choice.technique).gradient_steps(choice, num_read)
        if segment_steps is not None:
            if prepared.gradient_reach is not None:
                return reach_of(job, prepared.train, prepared.validation, segment_steps)
            return truncated_reach(num_read, segment_steps)
    return prepared.gradient_reach


def _oom_kills() -> int | None:
    kills = oom_kill_count()
    return None if kills is None else kills.number
