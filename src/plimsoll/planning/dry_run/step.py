"""The dry run of a training step: the step of `plimsoll train` on fake tensors.

`TrainStep` itself is traced, with its copies for undo, its micro-batches and its evaluation, so a prediction and a run
cannot diverge. Three steps are dry-run. The first creates the optimizer states, the second reuses them, and the third
follows an evaluation. A fourth would be like the third.

A batch of many micro-batches is dry-run with two of them and a smaller last one. Only the first micro-batch has no
gradients to add to. For a given batch with samples of different lengths, the two micro-batches that need most memory
are used. Repeated ops are recorded from their first occurrence: passes (`plimsoll.step.folding.passes`), blocks of a
pass (`plimsoll.step.folding.blocks`) and parts of an update (`plimsoll.step.folding.updates`).

Does not read the data. Every sample has the maximum length, unless the lengths of batches are given. Before the texts
are prepared, this length is ``sequence_length``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from plimsoll.data.batch import IGNORED_LABEL, Units, batch_size_of, pick_samples, split_batch
from plimsoll.data.quick_facts import TextSketch
from plimsoll.data.samples.teacher_cache import LOG_P, WORDS
from plimsoll.device.cpu.random import copy_host_state
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.trace import DryRun, dry_run, failures_explained, with_unknown_lengths
from plimsoll.models.build import build_model, import_library_of
from plimsoll.models.distillation.loss import Distillation
from plimsoll.models.optimizers import build_optimizer
from plimsoll.models.workload import LossFunction, Precision
from plimsoll.planning.dry_run.ranks import dry_run_ranks
from plimsoll.planning.teacher_loss import loss_for
from plimsoll.records.device import Device, MemoryUse
from plimsoll.records.job import Job
from plimsoll.records.trace import Phase, Trace
from plimsoll.step.fallbacks import samples_of
from plimsoll.step.folding.blocks import BlocksDiffer, FoldedBlocks
from plimsoll.step.folding.passes import Folded, passes_repeat
from plimsoll.step.folding.updates import FoldedUpdates
from plimsoll.step.job_step import step_of
from plimsoll.step.oom_boundary import Position
from plimsoll.step.recovery import samples_of_rank
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.scratch import ADDRESS_OF
from plimsoll.techniques import Choices, technique_of
from plimsoll.techniques.mechanisms.building import builds_outside, put_where_needed
from plimsoll.techniques.mechanisms.lengths import groups_by_length, lengths_of

_MOST_MICRO_BATCHES = 2
_FEW, _SHORT = 8, 64  # samples, and tokens of a sample, in made-up batches for real computation


class StageBackend:
    """`Backend` of a dry run, in which memory never runs out. It does not count, limit or restore any memory."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def probe(self) -> Device:
        """Raise an error: a step never probes its device."""
        raise AssertionError("a dry run has no device to describe")

    def use(self) -> MemoryUse:
        """Report that no memory is used."""
        return MemoryUse(used_bytes=0, peak_bytes=0, reserved_bytes=0)

    def baseline_bytes(self) -> int:
        """Report an empty baseline."""
        return 0

    def reset_peak(self) -> None:
        """Do nothing."""

    def limited(self, budget_bytes: int) -> nullcontext[None]:
        """Return a context that sets no limit."""
        return nullcontext()

    def reserved(self, sizes: list[int]) -> nullcontext[None] | None:
        """Return a context that reserves nothing; ``None`` for a GPU, whose real backend cannot reserve memory."""
        return nullcontext() if self.kind == "cpu" else None

    def without_holes(self) -> nullcontext[None]:
        """Return a context that does nothing: a trace has no heap."""
        return nullcontext()

    def release(self, last_resort: bool = False) -> None:
        """Do nothing."""

    def oom_family(self, error: BaseException) -> str | None:
        """Report that an error is not an out-of-memory error."""
        return None

    def is_nearly_full(self) -> bool:
        """Return False."""
        return False

    def random_state(self) -> dict[str, Any]:
        """Return a copy of the host's random state, because this copy takes memory in a real step."""
        return copy_host_state()

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def dry_run_job(
    job: Job,
    texts: TextSketch,
    lowering: Lowering,
    choices: Choices,
    lengths: tuple[int, ...] = (),
    *,
    is_short: bool = False,
) -> Trace:
    """Trace the training of a job.

    Args:
        job: the job. For several ranks, rank 0 is traced.
        texts: facts of the data that the model depends on.
        lowering: the target.
        choices: the techniques, including a micro-batch.
        lengths: padded length in tokens of each step's batch; by default the longest possible.
        is_short: dry-run two steps, the first with one micro-batch. This leaves out the step after an evaluation, and
            extra memory of a first step.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        InputError: if the model cannot be traced.
    """
    import_library_of(job)  # imported first, because the dry run changes the functions of tensors that libraries query
    num_samples = dry_run_samples(samples_of_rank(job), samples_of(choices))
    longest = texts.longest or job.sequence_length
    batches = [_batch(job, texts, num_samples, length) for length in lengths or (longest,) * 3]
    if is_short:
        batches = [split_batch(batches[0], samples_of(choices))[0], batches[1]]
    most = texts.held_out or (job.batch_size, job.sequence_length)
    held_out = _batch(job, texts, *most) if job.data.validation else None

    alone = Ranks()  # made here, because a real one exists before memory is measured

    def trace_with(keeps_all: bool, folds_blocks: bool) -> Trace:
        position, others = Position(), dry_run_ranks(job.ranks) if job.ranks > 1 else nullcontext(alone)
        with _stage(lowering, position, keeps_all, folds_blocks) as stage, others as ranks:
            step = _train_job(job, texts, stage, position, lowering, choices, batches, held_out, ranks)
            trace = stage.trace()
            step.close()
        return trace

    return with_unknown_lengths(_folding_blocks(trace_with))


def _train_job(  # noqa: PLR0917 -- one call
    job: Job,
    texts: TextSketch,
    stage: DryRun,
    position: Position,
    lowering: Lowering,
    choices: Choices,
    batches: list[Any],
    held_out: Any | None,
    ranks: Ranks,
) -> TrainStep:
    """Run the steps of a training process in a dry run, and return the step."""
    # On CUDA, these files represent host memory.
    files = MappedPool() if builds_outside(choices, lowering.kind) else None
    with failures_explained("the model of this job", stage):
        model = build_model(job, *texts.of_model, files=files).train()
        loss = loss_for(job, texts, lowering.device)
    put_where_needed(model, lowering.device, choices)
    stage.recorder.know_model(model)
    if isinstance(loss, Distillation) and loss.teacher is not None:
        stage.recorder.know_teacher(loss.teacher)
    optimizer = build_optimizer(job.optimizer, model.parameters())
    backend = StageBackend(lowering.kind)
    step = step_of(
        job,
        model,
        optimizer,
        [choices],
        loss=loss,
        full_length=texts.longest,
        backend=backend,
        position=position,
        files=files,
        ranks=ranks,
    )
    stage.recorder.know_model(step.workload.model)  # a technique may have replaced it
    with failures_explained("the model of this job", stage):
        _dry_run(stage, step, choices, batches, held_out, has_states=bool(job.evaluate_every))
    return step


def dry_run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: LossFunction,
    lowering: Lowering,
    *,
    units: Units | None,
    choices: Choices,
    clip_norm: float | None,
    precision: Precision,
    is_short: bool = False,
) -> Trace:
    """Trace the training of an existing model and optimizer, on fake copies: three steps, or two if ``is_short``.

    Args:
        model: see `TrainStep`, also for other arguments without a description.
        optimizer: see `model`.
        batch: one batch, on the CPU.
        loss: see `model`.
        lowering: the target.
        units: see `model`.
        choices: the techniques, including a micro-batch.
        clip_norm: see `model`.
        precision: see `model`.
        is_short: see `dry_run_job`.

    Raises:
        InputError: if the model fails, or cannot be traced.
    """
    micro_batch = samples_of(choices)
    cut = _telling_samples(batch, micro_batch, model, choices)
    batches = [split_batch(cut, micro_batch)[0], cut] if is_short else [cut] * 3
    alone = Ranks()  # made here, because a real one exists before memory is measured

    def trace_with(keeps_all: bool, folds_blocks: bool) -> Trace:
        position = Position()
        with _stage(lowering, position, keeps_all, folds_blocks) as stage:
            if hasattr(model, "_orig_mod"):  # by torch.compile
                stage.known.assume("the model is compiled, and was traced as if it were not")
            fake_model, fake_optimizer = stage.fake_training(getattr(model, "_orig_mod", model), optimizer)
            stage.recorder.know_model(fake_model)
            stage.recorder.know_optimizer(fake_optimizer)
            step = TrainStep(
                fake_model,
                fake_optimizer,
                loss,
                units=batch_size_of if callable(units) else units,  # a function would read values of fake tensors
                fallbacks=[choices],
                clip_norm=clip_norm,
                precision=precision,
                recut_loss=True,  # the planner has checked it
                backend=StageBackend(lowering.kind),
                position=position,
                ranks=alone,
            )
            with failures_explained(f"the model {type(model).__name__}", stage):
                _dry_run(stage, step, choices, batches, None, has_states=False)
            trace = stage.trace()
            step.close()
        return trace

    return with_unknown_lengths(_folding_blocks(trace_with))


def _folding_blocks(trace_with: Callable[[bool, bool], Trace]) -> Callable[[bool], Trace]:
    """Return a function that traces only one of several equivalent blocks and repeats its events for the others.

    If the blocks differ after all, the function traces every block.
    """

    def traced(keeps_all: bool) -> Trace:
        with suppress(BlocksDiffer):
            return trace_with(keeps_all, True)
        return trace_with(keeps_all, False)

    return traced


@contextmanager
def _stage(lowering: Lowering, position: Position, keeps_all: bool, folds_blocks: bool = True) -> Iterator[DryRun]:
    with dry_run(lowering, lambda: _phase(position), keeps_all) as stage, _fake_tensors_are_plain():
        stage.folds_blocks = folds_blocks
        yield stage


def _dry_run(  # noqa: PLR0917 -- one call
    stage: DryRun, step: TrainStep, choices: Choices, batches: list[Any], held_out: Any | None, has_states: bool
) -> None:
    """Run a step on each batch. Evaluate after the second step or, without ``has_states``, after the last step."""
    if passes_repeat(step.workload, choices):
        may_fold = stage.folds_blocks and not any(technique_of(choice.technique).spans_blocks for choice in choices)
        blocks = FoldedBlocks(stage.recorder, step.workload.model) if may_fold else None
        step._passes.folded = Folded(stage.recorder, step.workload, step._all_parameters, blocks)
        step._commit.folded = FoldedUpdates(stage.recorder, step.workload.optimizer)
    if held_out is not None:
        num_samples = _evaluated_samples(batch_size_of(held_out), step.evaluated_at_once)
        with _disable_current_modes():  # splitting is not part of the training
            held_out = tree_map(torch.clone, split_batch(held_out, num_samples)[0])
    try:
        _take_steps(stage, step, batches, held_out, has_states)
    except BlocksDiffer:  # the training is traced again in the same process
        step.close()
        raise


def _take_steps(stage: DryRun, step: TrainStep, batches: list[Any], held_out: Any | None, has_states: bool) -> None:
    for number, batch in enumerate(batches, start=1):
        stage.recorder.step = number
        step(stage.fake_batch(batch))
        stage.recorder.know_optimizer(step.workload.optimizer)
        if number == 2 and held_out is not None and has_states:
            step.evaluate([stage.fake_batch(held_out)])
    if held_out is not None and not has_states:
        step.drop_optimizer_states()
        step.evaluate([stage.fake_batch(held_out)])


def dry_run_samples(batch_size: int, micro_batch: int) -> int:
    """Return the number of samples in a dry-run batch.

    The batch has at most `_MOST_MICRO_BATCHES` micro-batches, and the remainder of the real batch. The second
    micro-batch has gradients to add to. A smaller last micro-batch never needs the most memory.
    """
    return min(batch_size, _MOST_MICRO_BATCHES * micro_batch + batch_size % micro_batch)


def _evaluated_samples(num_samples: int, at_once: Callable[[int], int]) -> int:
    """Return the smallest number of samples whose evaluation uses the same micro-batch and remainder as the batch."""
    size = at_once(num_samples)
    fewer = range(_MOST_MICRO_BATCHES * size + num_samples % size, num_samples, size)
    return next((number for number in fewer if at_once(number) == size), num_samples)


def _telling_samples(batch: Any, micro_batch: int, model: nn.Module, choices: Choices) -> Any:
    """Return the samples of a batch whose passes need most memory, or the first samples if all passes need the same.

    Passes need different memory in two cases. If micro-batches are sorted by length, each is padded only to its longest
    sample. If the model has a recurrent layer, it packs its input by the mask.

    With sorting, the result has the pass with the longest sample, and the pass with most tokens among the remaining
    passes. Otherwise it has the two passes with most tokens, the larger one last, because it has gradients to add to.
    """
    num_samples = batch_size_of(batch)
    first = split_batch(batch, dry_run_samples(num_samples, micro_batch))[0]
    is_by_length = any(technique_of(choice.technique).cuts_by_length for choice in choices)
    if not is_by_length and not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return first
    lengths, groups = lengths_of(batch), groups_by_length(batch, micro_batch)
    if lengths is None or groups is None or len(set(lengths)) == 1:
        return first
    cut = [range(start, min(start + micro_batch, num_samples)) for start in range(0, num_samples, micro_batch)]
    passes: list[Sequence[int]] = [numbers for numbers, _ in groups] if is_by_length else [*cut]
    if len(passes) <= _MOST_MICRO_BATCHES:
        return batch

    def num_tokens(numbers: Sequence[int]) -> int:
        return sum(lengths[number] for number in numbers)

    if is_by_length:
        return pick_samples(batch, [*passes[0], *max(passes[1:], key=num_tokens)])
    heaviest = max(passes, key=num_tokens)
    before = max((one for one in passes if one != heaviest and len(one) == micro_batch), key=num_tokens)
    return pick_samples(batch, [*before, *heaviest])


def _batch(job: Job, texts: TextSketch, num_samples: int, length: int) -> dict[str, Tensor]:
    """Return a batch as the loader makes it, with samples of one length."""
    if job.distill is not None and job.distill.cache:
        plain = _batch(job.model_copy(update={"distill": None}), texts, num_samples, length)
        return plain | _said(job, texts, plain)
    generator = torch.Generator().manual_seed(0)  # separate, so that the caller's random state is unchanged
    input_ids = torch.randint(texts.vocab_size, (num_samples, length), generator=generator)
    if texts.num_labels is not None:
        of_tokens = (length,) if job.task == "token-classification" else ()
        labels = torch.randint(texts.num_labels, (num_samples, *of_tokens), generator=generator)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}
    if job.data.pack:  # rows that contain two texts each
        position_ids = (torch.arange(length) % -(-length // 2)).expand(num_samples, length).clone()
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": input_ids.clone()}
    if job.data.has_padding:
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}
    fields = {"input_ids": input_ids, "labels": input_ids.clone()}
    if job.data.order == "streams":
        fields |= {"slots": torch.arange(num_samples), "windows": torch.ones(num_samples, dtype=torch.long)}
    if job.data.reset:  # once for each sample, all at one position
        fields["resets"] = (torch.arange(length) == length // 2).expand(num_samples, length).clone()
    return fields


def uneven_batch(job: Job, texts: TextSketch) -> dict[str, Tensor]:
    """Return a few made-up samples of a job. Their lengths differ if the lengths of real samples may differ."""
    length = min(job.sequence_length, _SHORT)
    fields = _batch(job, texts, _FEW, length)
    is_padded = torch.arange(length) >= torch.arange(length, length - _FEW, -1).clamp(min=2)[:, None]
    for name, padding in (("attention_mask", 0), ("labels", IGNORED_LABEL)):
        if "attention_mask" in fields and fields[name].shape == is_padded.shape:
            fields[name] = fields[name].masked_fill(is_padded, padding)
    return fields


def _said(job: Job, texts: TextSketch, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros in place of the cached teacher outputs of a batch, by field name."""
    assert job.distill is not None
    if texts.num_labels is not None:
        return {LOG_P: torch.zeros(*fields["labels"].shape, texts.num_labels)}
    shape = (*fields["input_ids"].shape, min(job.distill.cache or 1, texts.vocab_size))
    return {LOG_P: torch.zeros(shape), WORDS: torch.zeros(shape, dtype=torch.int32)}


def _phase(position: Position) -> Phase:
    return position.phase if position.phase != "fetch" else "copy"  # type: ignore[return-value]


@contextmanager
def _fake_tensors_are_plain() -> Iterator[None]:
    """Make the optimizer update copy fake tensors in the same way as real ones, while the block runs."""
    ADDRESS_OF[FakeTensor] = lambda tensor: tensor.untyped_storage()._cdata
    try:
        yield
    finally:
        del ADDRESS_OF[FakeTensor]
