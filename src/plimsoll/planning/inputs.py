"""The inputs of the planner: a job, or a model with its optimizer and a batch in a user's program.

Each input provides the planner (`plimsoll.planning.plan`) with the dry run of the training and the baseline of its
process. It also provides the facts that techniques and plans depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plimsoll.data.batch import Units, batch_size_of
from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.device.base import backend_for
from plimsoll.errors import InputError
from plimsoll.memory.lowering.base import Lowering
from plimsoll.models.assemble import require_vectors
from plimsoll.models.build import build_model, loss_of
from plimsoll.models.optimizers import build_optimizer
from plimsoll.models.workload import LossFunction, Precision, Workload
from plimsoll.planning.cached_baseline import Baseline
from plimsoll.planning.cached_traces import trace_of
from plimsoll.planning.dry_run.processes import Asked, Tracers
from plimsoll.planning.dry_run.step import dry_run_step, uneven_batch
from plimsoll.planning.plan_validity import facts_of, facts_of_model
from plimsoll.planning.predict_step import model_bytes
from plimsoll.planning.targets import own_baseline
from plimsoll.planning.teacher_loss import loss_for, sketched_loss
from plimsoll.records.job import RECUTS, Job
from plimsoll.records.plan import LossCheck
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Trace
from plimsoll.records.units import format_bytes
from plimsoll.step.job_step import subject_of
from plimsoll.step.losses.additive import loss_check_of
from plimsoll.step.losses.few_rows import ask_few_rows
from plimsoll.step.oom_boundary import without_fail
from plimsoll.step.recovery import samples_of_rank
from plimsoll.techniques import TECHNIQUES, Choices
from plimsoll.techniques.mechanisms.technique import OfRows

_MOST_BUILT_BYTES = 1 << 30  # size limit of a model that planning builds to check its loss


def allowed(names: Iterable[str]) -> frozenset[str]:
    """Return the allowed lossy techniques as a set.

    Raises:
        InputError: if a name needs no permission or does not exist, or a single string is given instead of a list.
    """
    lossy = (one.name for one in TECHNIQUES.values() if one.may_be_allowed or one.numerics == "lossy")
    known = (*RECUTS, *lossy)
    given = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in given if name not in known]
    if unknown or isinstance(names, str):
        shown = repr(names) if isinstance(names, str) else ", ".join(unknown)
        raise InputError(f"allow={shown}: give a list of names, of {', '.join(known)}")
    return frozenset(given)


class PlanningInput(Protocol):
    """A training run to plan.

    ``precision`` may be ``auto``, which leaves it to the plan. Planning sets ``workload.kept_whole`` if the batch may
    not be split.

    Attributes:
        evaluates_between_steps: whether the training evaluates between steps. A step after an evaluation may need more
            memory than other steps.
        tokenizer_bytes: peak memory in bytes of training the tokenizer; ``None`` if no tokenizer is trained.
        num_traces: number of traces that were made because they were not cached.
        ask_rows: see `plimsoll.techniques.Setting`.
    """

    batch_size: int
    num_ranks: int
    sequence_length: int | None
    precision: str
    allow: frozenset[str]
    lengths_vary: bool
    evaluates_between_steps: bool
    tokenizer_bytes: int | None
    num_traces: int
    workload: Workload
    ask_rows: Callable[[OfRows], str | None] | None

    @property
    def tracers(self) -> Tracers:
        """The processes that make traces for `dry_run` in advance."""
        ...

    def dry_run(self, lowering: Lowering, choices: Choices, is_short: bool) -> Trace:
        """Trace the training with techniques installed."""
        ...

    def loss_check(self) -> LossCheck:
        """Check whether batches may be split into micro-batches without changing the loss."""
        ...

    def baseline(self) -> Estimate:
        """Return the memory that the training process uses on the CPU before it has a model."""
        ...

    def facts(self, target: str) -> dict[str, str]:
        """Return the facts that a plan depends on, by name."""
        ...

    def described(self, precision: str) -> str:
        """Return a one-line description of the training."""
        ...


class JobInput:
    """A `PlanningInput` for the training of a job.

    Args:
        job: the job.
        started: a running measurement of the baseline, needed if the plan is for the CPU.
        texts: facts of the prepared data; by default they are sketched from the files.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DataError: if the tokenizer cannot be loaded, or there are no labels.
    """

    def __init__(self, job: Job, started: Baseline | None = None, texts: TextSketch | None = None) -> None:
        self._job, self._started, self.num_traces = job, started, 0
        self.tracers = Tracers()
        self.ask_rows: Callable[[OfRows], str | None] | None = None
        require_vectors(job)
        texts = sketch_texts(job) if texts is None else texts
        self._texts = texts
        self.batch_size, self.num_ranks = samples_of_rank(job), job.ranks
        self.sequence_length: int | None = texts.longest or job.sequence_length
        self.precision: str = job.precision
        self.allow = allowed(job.allow)
        self.lengths_vary = job.is_labelled or job.data.has_padding
        self.tokenizer_bytes = texts.tokenizer_bytes
        self.evaluates_between_steps = bool(job.data.validation and job.evaluate_every)
        model = build_model(job, *texts.of_model, device="meta").train()
        self.workload = Workload(
            model,
            build_optimizer(job.optimizer, model.parameters()),
            sketched_loss(job, texts, model),
            loss_of(job.task)[1],
            clip_norm=job.optimizer.clip_norm,
            precision=job.own_precision,
            device=torch.device("meta"),
        )

    @contextmanager
    def traced_apart(self) -> Iterator[None]:
        """Run the worker processes of `tracers`, which make traces in advance, while the block runs."""
        with Tracers.started(self._job, self._texts) as self.tracers:
            yield
        self.tracers = Tracers()

    def dry_run(self, lowering: Lowering, choices: Choices, is_short: bool) -> Trace:
        """Trace the training with techniques installed."""
        ahead = self.tracers.take(Asked(lowering, choices, is_short))
        trace, is_kept = ahead or trace_of(self._job, self._texts, lowering, choices, is_short=is_short)
        self.num_traces += not is_kept
        return trace

    def loss_check(self) -> LossCheck:
        """Check whether batches may be split into micro-batches without changing the loss. May build the model."""
        job, workload = self._job, self.workload
        found = loss_check_of(workload, None, backend_for("cpu"), "recut_loss" in job.allow, never_cut=False)
        if found.verdict != "not computed":
            return found
        num_bytes = sum(one.nbytes for one in workload.model.parameters())
        if num_bytes > _MOST_BUILT_BYTES:
            return LossCheck.not_computed(f"the model of {format_bytes(num_bytes)} is not built to plan")
        checked = without_fail(self._checked)
        return (
            LossCheck.not_computed(f"it fails on made-up samples ({checked})") if isinstance(checked, str) else checked
        )

    def _checked(self) -> LossCheck:
        job, texts = self._job, self._texts
        backend = backend_for("cpu")
        random_state = backend.random_state()
        model = build_model(job, *texts.of_model).train()
        optimizer = build_optimizer(job.optimizer, model.parameters())
        workload = replace(
            self.workload,
            model=model,
            optimizer=optimizer,
            loss=loss_for(job, texts, "cpu"),
            device=torch.device("cpu"),
        )
        try:
            return loss_check_of(workload, uneven_batch(job, texts), backend, recut_loss=False, never_cut=False)
        finally:
            backend.restore_random_state(random_state)

    def baseline(self) -> Estimate:
        """Wait for the baseline: the memory that the training process uses on the CPU before it has a model."""
        assert self._started is not None
        return self._started.wait()

    def facts(self, target: str) -> dict[str, str]:
        """Return the facts that a plan depends on, by name."""
        return facts_of(self._job, self._texts, target)

    def described(self, precision: str) -> str:
        """Return a one-line description of the training."""
        return subject_of(self._job, precision)


@dataclass
class StepInput:
    """A `PlanningInput` for an existing model, optimizer and batch.

    The fields from ``model`` to ``never_cut`` are as in `plimsoll.planning.plan.plan_step`. ``checked`` is an earlier
    result of the check whether the batch may be split into micro-batches; ``None`` if there is no earlier result.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    loss: LossFunction
    units: Units | None
    clip_norm: float | None
    precision: str
    allow: frozenset[str]
    never_cut: bool = False
    checked: LossCheck | None = None
    evaluates_between_steps: bool = field(init=False, default=False)
    tokenizer_bytes: int | None = field(init=False, default=None)
    num_ranks: int = field(init=False, default=1)
    num_traces: int = field(init=False, default=0)
    batch_size: int = field(init=False)
    sequence_length: int | None = field(init=False)
    lengths_vary: bool = field(init=False)
    workload: Workload = field(init=False)
    ask_rows: Callable[[OfRows], str | None] | None = field(init=False)
    tracers: Tracers = field(init=False, default_factory=Tracers)  # a program may have threads, so it is not forked

    def __post_init__(self) -> None:
        self.batch_size = batch_size_of(self.batch)
        tokens = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dim() == 2]
        self.sequence_length = max((leaf.shape[1] for leaf in tokens), default=None)
        self.lengths_vary = isinstance(self.batch, dict) and "attention_mask" in self.batch
        self.workload = Workload(
            self.model,
            self.optimizer,
            self.loss,
            self.units or "samples",
            clip_norm=self.clip_norm,
            precision=self._own_precision,
            device=next((one.device for one in self.model.parameters()), torch.device("cpu")),
        )
        self.ask_rows = cache(partial(ask_few_rows, self.workload, self.batch))

    @property
    def _own_precision(self) -> Precision:
        return "fp32" if self.precision == "auto" else self.precision  # type: ignore[return-value]

    def dry_run(self, lowering: Lowering, choices: Choices, is_short: bool) -> Trace:
        """Trace the training with techniques installed."""
        self.num_traces += 1
        return dry_run_step(
            self.model,
            self.optimizer,
            self.batch,
            self.loss,
            lowering,
            units=self.units,
            choices=choices,
            clip_norm=self.clip_norm,
            precision=self._own_precision,
            is_short=is_short,
        )

    def loss_check(self) -> LossCheck:
        """Check with some samples whether the batch may be split into micro-batches without changing the loss."""
        if self.checked is not None:
            return self.checked
        backend = backend_for("cpu" if self.workload.device.type == "meta" else str(self.workload.device))
        return loss_check_of(self.workload, self.batch, backend, "recut_loss" in self.allow, self.never_cut)

    def baseline(self) -> Estimate:
        """Return the memory of this process without the model and its states."""
        return own_baseline(model_bytes(self.model, self.optimizer))

    def facts(self, target: str) -> dict[str, str]:
        """Return the facts that a plan depends on, by name."""
        return facts_of_model(self.model, self.optimizer, target)

    def described(self, precision: str) -> str:
        """Return a one-line description of the training."""
        return f"{type(self.model).__name__}, {self.batch_size} samples a step, {precision}"
