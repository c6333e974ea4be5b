"""The check whether a loss is additive: whether the loss of a batch is the weighted sum of the losses of its parts.

Only if the loss is additive may a batch be split ("cut"): into micro-batches, over ranks or into passes of an
evaluation. A loss is not additive if it compares the samples of a batch (contrastive losses) or averages over something
other than the units (class weights). Nor is a loss with a term over the whole batch (the load balance of a router). So
before a batch is split, losses and gradients of a few samples are computed in one pass and in separate passes, and
compared. All effects of these passes are undone (`plimsoll.step.losses.without_dropout`,
`plimsoll.step.undo.step_state`).

The check costs two passes of at most sixteen samples. It runs for each new kind of batch, that is, when fields, labels
or padding occur that were not compared before. It is repeated at the 2nd, 4th, 8th, ... split.

Does not detect effects that appear only with more samples. Effects that appear later in a training are detected at the
next check.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.data.batch import batch_size_of, count_units, move_batch, pick_samples
from plimsoll.device.base import Backend
from plimsoll.errors import InputError
from plimsoll.models.workload import Reason, Workload
from plimsoll.records.plan import LossCheck, Verdict
from plimsoll.records.run import OomEvent
from plimsoll.step.collective import attempt_collectively
from plimsoll.step.losses.known import is_usual, known_additive, known_reason
from plimsoll.step.losses.probe_samples import Kinds, first_rows, joined_samples, telling_rows
from plimsoll.step.losses.without_dropout import undropped
from plimsoll.step.micro_batches import mean_loss, shape_of, weighted_micro_batches
from plimsoll.step.oom_boundary import Position, attempt_twice, without_fail
from plimsoll.step.undo.saved import Stateful, is_same_state
from plimsoll.step.undo.step_state import Undo, left_alone
from plimsoll.techniques.mechanisms.segment_recompute import has_hook

LossOf = Callable[[Any, float], Tensor]
"""``(micro-batch, share) -> mean loss``; the share is the part of the batch's units that are in the micro-batch."""

_NUM_ROWS = (16, 8, 4, 2)  # fewer if memory runs out
_MOST_GRADIENTS = 1 << 20  # numbers to compare
# Tolerated relative difference, in roundings of the precision: in fp32 1e-6 of the loss (models of six layers had
# 1e-7). For bf16 (8e-3) and fp16 (1e-3) it is one rounding.
_NUM_ROUNDINGS = 8
_GRADIENTS_TO_LOSSES = 4  # gradients may differ more than losses, by this factor
# Roundings weigh more if a loss cancels (the squared error of a model that predicts well). If values differ, they are
# computed again with parameters changed by a rounding. A multiple of the resulting change is tolerated, too.
_NUM_CHANGES = 2
_MOST_CHANGES = 3  # the largest multiple of these changes that is tolerated
_LEAST_DIFFERENCE = 1e-6  # a model in float64 may have a loss that computes in float32
_MOST_ROWS_TRIED = 64  # samples, until two with a target are found

_ALTERNATIVES = (
    "give the units that it averages over, a function from a batch to a number; for a loss that compares samples use "
    "the technique gradient_cache, or a cached loss (sentence-transformers' CachedMultipleNegativesRankingLoss); keep "
    "batches whole with never_cut=True; or allow a different loss with recut_loss=True (job.yaml: allow: [recut_loss])"
)
_NOT_ADDITIVE = "the loss of a batch is not the sum of the losses of its parts"
_OF_WEIGHTS = "cross_entropy(weight=...) averages over the weights of the labels, and not over"
_RANDOM = "the loss, or the model, draws random numbers besides dropout, and a cut changes these numbers"
_FAILS = "the loss cannot be computed for a few samples of a batch"
_SAMPLES_FIRST = "put the samples in dimension 0 of every field (time-first texts cannot be cut)"
_WEIGHTS = (
    'give units=lambda batch: float(weight[batch["labels"]].sum()), the divisor of the loss; keep batches whole with '
    "never_cut=True; or allow a different loss with recut_loss=True"
)
_ALLOW = "keep batches whole with never_cut=True, or allow it with recut_loss=True (job.yaml: allow: [recut_loss])"
_KNOWN = LossCheck(verdict="known", why="a loss that is known to be additive")


class _Found(NamedTuple):
    """The loss of some samples in one pass (``whole``) and in several passes (``parts``), and observations from these.

    The differences are relative. ``most_difference`` is the difference that rounding explains, and ``by_rounding`` the
    change that rounding the parameters causes. ``gradient_difference`` is ``None`` if no gradients were computed.
    ``averages_weights`` is true if the loss averages over class weights. ``shows`` is false if loss and gradients are
    all zero, which shows nothing.
    """

    num_samples: int
    whole: float
    parts: float
    difference: float
    gradient_difference: float | None
    most_difference: float
    is_random: bool
    averages_weights: bool
    shows: bool
    by_rounding: float = 0.0
    gradient_by_rounding: float = 0.0

    def is_loss_equal(self) -> bool:
        return self.difference <= max(self.most_difference, _MOST_CHANGES * self.by_rounding)

    def is_gradient_equal(self) -> bool:
        most = max(_GRADIENTS_TO_LOSSES * self.most_difference, _MOST_CHANGES * self.gradient_by_rounding)
        return (self.gradient_difference or 0.0) <= most


class Additivity:
    """The check that the loss of one training run is additive, made before a batch is split.

    ``found`` is the latest result; ``None`` as long as nothing is known.

    Args:
        workload: the training run, before techniques are installed. ``kept_whole`` is set if the loss is not additive.
        backend: the backend of the device.
        position: the current position in the training run.
        recut_loss: whether the user allows a loss that changes when a batch is split. If so, nothing is compared.
        never_cut: whether the user forbids splitting batches.
        extra_state: objects that are restored after samples have been compared, as for a step.
        roots: further objects that may hold state of the loss, by name.
    """

    def __init__(
        self,
        workload: Workload,
        backend: Backend,
        position: Position,
        recut_loss: bool,
        never_cut: bool,
        *,
        extra_state: Sequence[Stateful] = (),
        roots: Mapping[str, Any] | None = None,
    ) -> None:
        self._workload, self._backend, self._position = workload, backend, position
        self.is_known = known_additive(workload)
        self.found: LossCheck | None = _said(workload, recut_loss, never_cut, self.is_known)
        self._kinds = Kinds()
        self._extra_state, self._roots = extra_state, roots or {}
        self._new: frozenset[tuple[Any, ...]] = frozenset()  # new kinds in the current batch
        self.most_samples = _NUM_ROWS[0]  # in one pass; fewer after the process was killed for memory
        self._has_own_rows = True  # whether the compared samples are from this rank
        self._num_cuts = self._num_checks = 0
        self._told: LossCheck | None = None

    def before_cut(self, batch: Any, loss_of: LossOf | None = None) -> Reason | None:
        """Return the reason why a batch must not be split; ``None`` if it may be split. All ranks must call it.

        Args:
            batch: this rank's part of the batch.
            loss_of: computes the loss of a micro-batch as the caller's loop does; by default ``workload.loss``.
        """
        workload = self._workload
        if workload.kept_whole is None:
            ask = partial(self._ask, batch, loss_of or self._loss_of)
            # Ranks communicate in it, so no rank may retry alone.
            found = attempt_twice(ask, self._backend, self._position) if workload.ranks.is_alone else ask()
            self.found = _out_of_memory("samples were compared", found) if isinstance(found, OomEvent) else found
        if self.found is not None and not self.found.may_cut:
            workload.kept_whole = Reason(self.found.why, self.found.remedy)
        return workload.kept_whole

    def news(self) -> LossCheck | None:
        """Return the latest result if it is new since the last call.

        Returns ``None`` otherwise, and always if the user's options determine the result.
        """
        told, self._told = self._told, self.found
        return self.found if self._num_cuts and self.found is not told else None

    def _ask(self, batch: Any, loss_of: LossOf) -> LossCheck | None:
        return (self._check(batch, loss_of) if self._is_due(batch) else None) or self.found

    def _is_due(self, batch: Any) -> bool:
        """Return whether samples of this batch must be compared, because a check is due on some rank."""
        if self.found is not None and self.found.verdict in {"allowed", "never cut", "not computed"}:
            return False
        self._num_cuts += 1
        has_none = not self._workload.ranks.is_alone and not batch
        is_known = has_none or (self.is_known and is_usual(batch, self._workload))
        if self.is_known and not self._workload.ranks.agree(not is_known):
            self.found = self.found or _KNOWN
            return False
        mode = ("", "training", self._workload.model.training)
        self._new = frozenset() if has_none else self._kinds.new_in(batch, mode)
        return self._workload.ranks.agree(bool(self._new)) or self._num_cuts & (self._num_cuts - 1) == 0

    def _check(self, batch: Any, loss_of: LossOf) -> LossCheck | None:
        """Compare the loss of samples in one pass and in parts; ``None`` if this is impossible, for example for NaN."""
        rows = self._rows(batch)
        if isinstance(rows, LossCheck) or rows is None:
            return rows
        self._num_checks += 1
        position, precision = self._position, self._workload.precision
        phase, samples = position.phase, position.samples
        position.samples = ()  # these are sample numbers of an evaluation; this check does not belong to one
        try:
            found = self._compared(rows, loss_of)
            if isinstance(found, str):
                self._attempt(partial(self._whole, batch if self._workload.ranks.is_alone else rows, loss_of))
                self._kinds.note(self._new)
                return LossCheck(verdict="not shown", why=f"{_FAILS} ({found})", remedy=f"{_SAMPLES_FIRST}; {_ALLOW}")
        finally:
            self._workload.precision, position.phase, position.samples = precision, phase, samples
        compared = pick_samples(rows, range(found.num_samples)) if isinstance(found, _Found) else None
        self._kinds.note(self._new, compared, is_own=self._has_own_rows)
        if isinstance(found, OomEvent):
            return _out_of_memory("the loss of two samples was computed at once", found)
        return None if found is None else _verdict(found, self._workload, self._num_cuts, self._num_checks)

    def _whole(self, batch: Any, loss_of: LossOf) -> None:
        """Compute the loss of a whole batch. If this fails, too, the error is the user's and is raised."""
        with self._left_alone(loss_of, batch):
            _loss(loss_of, [], self._backend.random_state(), self._backend, batch, 1.0)

    def _left_alone(self, loss: Any, batch: Any) -> AbstractContextManager[Undo]:
        roots = {"model": self._workload.model, "loss": loss, **self._roots}
        is_sharded = self._workload.hooks.sharding.is_sharded
        return left_alone(
            roots,
            self._backend,
            batch,
            extra_state=self._extra_state,
            optimizer=self._workload.optimizer,
            observes=not is_sharded,
        )

    def _compared(self, rows: Any, loss_of: LossOf) -> _Found | OomEvent | str | None:
        """Compare the loss, and if possible the gradients, of as many samples as fit.

        Return an event or an error message if all attempts fail.
        """
        precision = self._workload.precision
        is_sharded = self._workload.hooks.sharding.is_sharded
        has_gradients = torch.is_grad_enabled() and not is_sharded and not _is_watched(self._workload)
        most = min(batch_size_of(rows), max(self.most_samples, 2))
        counts = list(dict.fromkeys(min(count, most) for count in _NUM_ROWS))
        attempts = [(count, True, False) for count in counts if has_gradients]
        attempts += [(count, False, False) for count in (counts[0], counts[-1])]
        attempts += [(counts[-1], has_gradients, True)] if precision != "fp32" else []
        # A loss that fails for a single sample may work for several.
        for is_single, (count, gradients, casts) in product((True, False), attempts):
            self._workload.precision = precision if casts else "fp32"
            some = pick_samples(rows, range(count))
            compare = partial(self._compare, some, 1 if is_single else count // 2 + 1, loss_of, gradients)
            found = without_fail(partial(self._attempt, compare))
            if isinstance(found, OomEvent):
                self._backend.release()
            elif not isinstance(found, str):
                return found
        self._workload.precision = precision
        return found

    def _attempt(self, compare: Callable[[], _Found | None]) -> _Found | OomEvent | None:
        return attempt_collectively(compare, self._backend, self._position, self._workload.ranks)

    def _compare(self, rows: Any, samples_of_part: int, loss_of: LossOf, gradients: bool) -> _Found | None:
        workload = self._workload
        shape = shape_of(rows, workload)
        random_state = self._backend.random_state()
        parameters = _smallest(workload) if gradients else []
        self._position.phase = "forward"
        one = partial(_loss, loss_of, parameters, random_state, self._backend)
        function = workload.loss if loss_of == self._loss_of else loss_of
        with (
            warnings.catch_warnings(action="ignore"),
            undropped(workload.model) as mode,
            self._left_alone(function, rows) as before,
        ):
            whole = one(rows, 1.0)
            before.restore()  # so that state which a loss keeps between passes causes a difference
            parts = weighted_micro_batches(rows, samples_of_part, shape, workload)
            losses = [one(part, share) for part, share, _ in parts]
            dtypes = mode.dtypes | {one.dtype for one in workload.model.parameters() if one.is_floating_point()}
            found = _difference(shape.num_samples, whole, losses, _most_difference(dtypes), mode.averages_weights)
            if found is None or found.is_random or workload.hooks.sharding.is_sharded:
                return found
            if found.is_loss_equal() and found.is_gradient_equal():
                return found
            before.restore()
            if not _is_again(whole, one(rows, 1.0), found.most_difference):
                return found  # hidden state changes the loss by more than a rounding
            changed = list[_Loss]()
            for number in range(_NUM_CHANGES):
                before.restore()
                with _changed_by_a_rounding(_smallest(workload), number):
                    changed.append(one(rows, 1.0))
        return _with_roundings(found, whole, losses, changed)

    def _loss_of(self, part: Any, share: float) -> Tensor:
        return mean_loss(self._workload, move_batch(part, self._workload.device))

    def _rows(self, batch: Any) -> Any:
        """Return the samples to compare, identical on all ranks; ``None`` if there are fewer than two with a target."""
        own = None if batch is None or (isinstance(batch, dict) and not batch) else self._telling(batch)
        ranks, self._has_own_rows = self._workload.ranks, True
        if not ranks.is_alone:
            here = None if own is None else move_batch(own, torch.device("cpu"))
            told = ranks.gather_agreed((here, len(self._new)))
            best = max(range(len(told)), key=lambda rank: _worth(*told[rank]))
            self._has_own_rows = best == ranks.rank
            own, every = told[best][0], [one for one, _ in told if one is not None]
            if own is not None and batch_size_of(own) < 2:
                own = joined_samples(every)
            if own is None and every and self.found is None:
                return LossCheck(
                    verdict="not shown",
                    why="no rank has two samples of a batch, so no losses can be compared",
                    remedy=f"give more samples to a batch; {_ALLOW}",
                )
        if own is None or batch_size_of(own) < 2:
            self._kinds.forget()  # so that the next batch is checked
            return None
        return own

    def _telling(self, batch: Any) -> Any:
        units = self._workload.units

        def is_learned(row: int) -> bool:
            return bool(count_units(pick_samples(batch, [row]), units))

        first = first_rows(batch, self._new, _NUM_ROWS[0] // 2, is_learned)
        rows = [row for row in telling_rows(batch, _NUM_ROWS[0], first) if is_learned(row)]
        others = (row for row in range(min(batch_size_of(batch), _MOST_ROWS_TRIED)) if row not in rows)
        while len(rows) < 2 and (row := next(others, None)) is not None:
            rows += [row] if is_learned(row) else []
        return pick_samples(batch, rows) if rows else None


def _worth(rows: Any, num_new: int) -> tuple[bool, int, int]:
    """Return a sort key for a rank's samples. The largest key belongs to the rank whose samples are best to compare."""
    num_rows = 0 if rows is None else batch_size_of(rows)
    return (num_rows > 1, num_new, num_rows)


def loss_check_of(  # noqa: PLR0917 -- the arguments of `Additivity`
    workload: Workload, batch: Any, backend: Backend, recut_loss: bool, never_cut: bool, loss_of: LossOf | None = None
) -> LossCheck:
    """Determine for a plan whether the loss of a training run is additive. Losses that are known are not computed."""
    additivity = Additivity(workload, backend, Position(), recut_loss, never_cut)
    if additivity.found is None and batch is not None:
        additivity.before_cut(batch, loss_of)
    if additivity.found is None and additivity.is_known:
        return _KNOWN
    return additivity.found or LossCheck.not_computed("the loss of the given samples is not finite")


def _out_of_memory(what: str, event: OomEvent) -> LossCheck:
    return LossCheck(verdict="not shown", why=f"memory ran out while {what} ({event.shortage})", remedy=_ALLOW)


class _Loss(NamedTuple):
    """The loss of some samples, its gradient, the share of these samples, and whether random numbers were drawn."""

    value: float
    gradient: Tensor | None
    share: float
    is_random: bool


def _loss(  # noqa: PLR0917 -- partial() binds all but the last two
    loss_of: LossOf,
    parameters: Sequence[Tensor],
    random_state: dict[str, Any],
    backend: Backend,
    part: Any,
    share: float,
) -> _Loss:
    backend.restore_random_state(random_state)
    with torch.set_grad_enabled(bool(parameters)), torch.autograd.set_multithreading_enabled(False):
        loss = loss_of(part, share)
        gradient = None
        if parameters and loss.requires_grad:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradient = torch.cat([_flat(one, of) for one, of in zip(found, parameters, strict=True)])
    return _Loss(float(loss.detach()), gradient, share, not is_same_state(backend.random_state(), random_state))


def _flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().flatten().double()


def _difference(
    num_samples: int, whole: _Loss, parts: list[_Loss], most_difference: float, averages_weights: bool
) -> _Found | None:
    total = sum(one.value * one.share for one in parts)
    size = _loss_scale(whole, parts)
    if not math.isfinite(whole.value) and not math.isfinite(total):
        return None
    difference = abs(whole.value - total) / size if size else 0.0
    gradient_difference, scale = None, 0.0
    if whole.gradient is not None and all(one.gradient is not None for one in parts):
        sums = [one.gradient * one.share for one in parts if one.gradient is not None]
        scale = _gradient_scale(whole, parts)
        gradient_difference = float((whole.gradient - sum(sums)).norm()) / scale if scale else 0.0
    return _Found(
        num_samples,
        whole.value,
        total,
        difference if math.isfinite(difference) else math.inf,
        gradient_difference,
        most_difference,
        any(one.is_random for one in (whole, *parts)),
        averages_weights,
        shows=size > 0 or scale > 0,
    )


def _loss_scale(whole: _Loss, parts: list[_Loss]) -> float:
    return max(abs(whole.value), sum(abs(one.value) * one.share for one in parts))


def _gradient_scale(whole: _Loss, parts: list[_Loss]) -> float:
    norms = [float(one.gradient.norm()) * one.share for one in (whole, *parts) if one.gradient is not None]
    return max(norms[0], sum(norms[1:]))


def _is_again(whole: _Loss, again: _Loss, most_difference: float) -> bool:
    """Return whether a repeated pass gave the same loss. Its gradient may differ by the order of additions."""
    if whole.value != again.value or (whole.gradient is None) != (again.gradient is None):
        return False
    if whole.gradient is None or again.gradient is None:
        return True
    most = _GRADIENTS_TO_LOSSES * most_difference * float(whole.gradient.norm())
    return float((whole.gradient - again.gradient).norm()) <= most


def _with_roundings(found: _Found, whole: _Loss, parts: list[_Loss], changed: list[_Loss]) -> _Found:
    """Return ``found`` with the changes of loss and gradient that rounding the parameters causes."""
    size = _loss_scale(whole, parts)
    changes = [abs(one.value - whole.value) / size for one in changed if size]
    by_rounding = max((change for change in changes if math.isfinite(change)), default=0.0)
    of_gradient = 0.0
    if found.gradient_difference is not None and (scale := _gradient_scale(whole, parts)):
        of_all = [float((one.gradient - whole.gradient).norm()) for one in changed if one.gradient is not None]  # type: ignore[operator]
        of_gradient = max((change / scale for change in of_all if math.isfinite(change)), default=0.0)
    return found._replace(by_rounding=by_rounding, gradient_by_rounding=of_gradient)


@contextmanager
def _changed_by_a_rounding(parameters: Sequence[Tensor], seed: int) -> Iterator[None]:
    """Inside the block, change each element by one rounding of its dtype, up or down at random but reproducibly."""
    draws = torch.Generator().manual_seed(seed)
    kept = [one.detach().clone() for one in parameters]
    try:
        with torch.no_grad():
            for one in parameters:
                signs = torch.randint(2, one.shape, generator=draws).mul(2).sub(1).to(one.device, one.dtype)
                one.mul_(signs.mul_(torch.finfo(one.dtype).eps).add_(1))
        yield
    finally:
        with torch.no_grad():
            for one, before in zip(parameters, kept, strict=True):
                one.copy_(before)


def _verdict(found: _Found, workload: Workload, num_cuts: int, num_checks: int) -> LossCheck:
    """Return the result of the check that follows from a comparison."""
    verdict, reason = _judged(found, workload)
    later = f"; found at cut {num_cuts}, earlier cuts looked additive" if reason and num_checks > 1 else ""
    return LossCheck(
        verdict=verdict,
        why=f"{reason.why}{later}" if reason else "",
        remedy=reason.remedy if reason else "",
        num_samples=found.num_samples,
        whole=found.whole,
        parts=found.parts,
        difference=found.difference,
        gradient_difference=found.gradient_difference,
    )


def _judged(found: _Found, workload: Workload) -> tuple[Verdict, Reason | None]:
    counted = workload.units if isinstance(workload.units, str) else "units"
    is_equal = found.is_loss_equal()
    if found.is_random:
        return "not shown", Reason(_RANDOM, _ALLOW)
    if not found.shows:
        return "not shown", Reason(
            f"the loss of {found.num_samples} samples is 0 with no gradient, which shows nothing about a cut", _ALLOW
        )
    if found.averages_weights and (not is_equal or not callable(workload.units)):
        return "not additive", Reason(f"{_OF_WEIGHTS} {counted}", _WEIGHTS)
    if not is_equal:
        of_all = f"for {found.num_samples} samples it is {found.whole:.6g} at once, and {found.parts:.6g} one by one"
        return "not additive", Reason(f"{_NOT_ADDITIVE}: {of_all}, weighted by {counted}", _ALTERNATIVES)
    if not found.is_gradient_equal():
        share = f"{found.gradient_difference or 0.0:.2g} of their norm"
        of_all = f"gradients of {found.num_samples} samples at once and one by one differ by {share}"
        return "not additive", Reason(f"{_NOT_ADDITIVE}: {of_all}, weighted by {counted}", _ALTERNATIVES)
    return "additive", None


def _said(workload: Workload, recut_loss: bool, never_cut: bool, is_known: bool) -> LossCheck | None:
    """Return the result of the check if the user's options or the code of the loss determine it.

    Returns ``None`` if losses must be compared, or if the loss is known to be additive.
    """
    if never_cut and recut_loss:
        raise InputError(f"never_cut={never_cut} forbids what recut_loss={recut_loss} allows: leave one of the two out")
    if never_cut:
        return LossCheck(verdict="never cut", why="never_cut=True says so", remedy="leave never_cut out")
    if recut_loss:
        return LossCheck(verdict="allowed", why="recut_loss=True allows a loss that changes when a batch is cut")
    reason = known_reason(workload)
    if reason is not None:
        return LossCheck(verdict="not additive", why=reason.why, remedy=reason.remedy)
    is_empty = any(isinstance(one, FakeTensor) or one.is_meta for one in workload.model.parameters())
    return LossCheck.not_computed("the parameters have no values") if is_empty and not is_known else None


def _is_watched(workload: Workload) -> bool:
    """Return whether a backward pass would call hooks of the user."""
    return any(one._backward_hooks or one._backward_pre_hooks for one in workload.model.modules())


def _smallest(workload: Workload) -> list[Tensor]:
    """Return the smallest trainable parameters, at least one. Their gradients reveal a loss with detached parts."""
    of_optimizer = (one for group in workload.optimizer.param_groups for one in group["params"])
    every = (one for one in (*workload.model.parameters(), *of_optimizer) if one.requires_grad and not has_hook(one))
    trained = {id(one): one for one in every}
    chosen: list[Tensor] = []
    num_numbers = 0
    for parameter in sorted(trained.values(), key=Tensor.numel):
        num_numbers += parameter.numel()
        if chosen and num_numbers > _MOST_GRADIENTS:
            break
        chosen.append(parameter)
    return chosen


def _most_difference(dtypes: set[torch.dtype]) -> float:
    rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    is_coarse = rounding > torch.finfo(torch.float32).eps
    return max(_LEAST_DIFFERENCE, rounding if is_coarse else _NUM_ROUNDINGS * rounding)
