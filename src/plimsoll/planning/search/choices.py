"""The search space: the choices that each technique offers for a training run, or the reason why it offers none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from math import inf

from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.planning.search.pins import Decided
from plimsoll.records.plan import MICRO_BATCH, Choice, Rejected, without_micro_batch
from plimsoll.techniques import TECHNIQUES, Choices, Setting, conflict_among, in_order, technique_of

_NOTHING_DECIDED = Decided((), frozenset(), frozenset())


@dataclass(frozen=True)
class Problem:
    """The problem to search a plan for: a training run, its limit, and the user's constraints.

    Attributes:
        limit_bytes: upper bound for the memory that a combination may need.
        margin_bytes: headroom between ``limit_bytes`` and the real limit, because a short dry run may underestimate
            the peak.
        update_seconds: duration of an update without techniques, an upper bound for the time that techniques save in
            it.
    """

    workload: Workload
    setting: Setting
    limit_bytes: int
    decided: Decided = _NOTHING_DECIDED
    margin_bytes: int = 0
    update_seconds: float = inf


@dataclass(frozen=True)
class AvailableChoices:
    """The choices to search.

    ``base`` is in every combination. ``sizes`` are the micro-batches in samples. ``options`` are the choices of each
    other technique, weakest first. ``closed`` are lossy choices that are not allowed. ``rejected`` has the choices that
    cannot be used, with their reasons.
    """

    base: Choices
    sizes: tuple[int, ...]
    options: dict[str, Choices] = field(default_factory=dict)
    closed: Choices = ()
    rejected: tuple[Rejected, ...] = ()


def available_choices(problem: Problem) -> AvailableChoices:
    """Collect the choices that every technique offers.

    Raises:
        InputError: if the pinned choices contradict each other, or the training.
    """
    workload, setting, pinned = problem.workload, problem.setting, problem.decided.pinned
    names = {choice.technique for choice in pinned}
    options: dict[str, Choices] = {}
    closed: list[Choice] = []
    rejected: list[Rejected] = []
    sizes = _sizes(problem)
    for name, technique in TECHNIQUES.items():
        if name in names or name == MICRO_BATCH:
            continue
        offered = _offered(name, problem, is_cut=not isinstance(sizes, str) and len(sizes) > 1)
        if isinstance(offered, str):
            rejected.append(Rejected(choices=(Choice(technique=name),), reason=offered))
        elif technique.numerics == "lossy" and name not in setting.allow:
            closed.append(offered[-1])
            what = f"changes the training ({technique.summary})"
            reason = f"{what}, and is not allowed: `allow: [{name}]` in the job allows it"
            rejected.append(Rejected(choices=(offered[-1],), reason=reason))
        else:
            options[name] = offered
    always = tuple(options.pop(name)[-1] for name in list(options) if technique_of(name).leaves_out_work)
    base = in_order((*pinned, *always))
    conflict = conflict_among(base, workload, setting)
    impossible = (
        conflict_among(in_order((*base, options[name][0])), workload, setting)
        for name in sorted(problem.decided.required & options.keys())
        if all(conflict_among(in_order((*base, choice)), workload, setting) for choice in options[name])
    )
    conflict = conflict or next(impossible, None)
    if conflict is not None:
        raise InputError(f"the pinned choices cannot be used: {conflict}; leave out a --pin")
    if isinstance(sizes, str):
        rejected.append(Rejected(choices=(Choice(technique=MICRO_BATCH),), reason=sizes))
        sizes = (setting.batch_size,)
    return AvailableChoices(without_micro_batch(base), sizes, options, tuple(closed), tuple(rejected))


def _offered(name: str, problem: Problem, is_cut: bool) -> Choices | str:
    """Return the choices of a technique, or the reason why it offers none.

    ``is_cut``: whether the batch may be split into micro-batches.
    """
    if name in problem.decided.forbidden:
        return "forbidden by the user"
    if technique_of(name).is_for_whole_batches and is_cut and name not in problem.decided.required:
        return f"this batch may be cut, and {MICRO_BATCH} takes less time"
    return technique_of(name).choices(problem.workload, problem.setting)


def _sizes(problem: Problem) -> tuple[int, ...] | str:
    pinned = [choice for choice in problem.decided.pinned if choice.technique == MICRO_BATCH]
    if pinned:
        return (int(pinned[0].options["samples"]),)
    if MICRO_BATCH in problem.decided.forbidden:
        return "forbidden by the user"
    offered = technique_of(MICRO_BATCH).choices(problem.workload, problem.setting)
    return offered if isinstance(offered, str) else tuple(int(choice.options["samples"]) for choice in offered)


class Compatibility:
    """Checker of whether choices can be combined. Each pair of choices is checked once."""

    def __init__(self, problem: Problem) -> None:
        self._reason = cache(lambda choices: conflict_among(choices, problem.workload, problem.setting))

    def allows(self, choices: Choices) -> bool:
        """Return whether no two of the choices exclude each other."""
        return all(self._reason((choice,)) is None for choice in choices) and all(
            self._reason(pair) is None for pair in combinations(choices, 2)
        )


def lossy_alternatives_of(problem: Problem, available: AvailableChoices, choices: Choices) -> Iterator[Choices]:
    """Yield, for each lossy choice that is not allowed, its combination with all given choices that are compatible."""
    size, *others = choices
    for lossy in available.closed:
        allow = problem.setting.allow | {lossy.technique}
        allows = Compatibility(replace(problem, setting=replace(problem.setting, allow=allow))).allows
        combination: Choices = (lossy,)
        for other in others:
            combination = (*combination, other) if allows((size, *in_order((*combination, other)))) else combination
        if allows((size, *combination)) and set(available.base) <= set(combination):
            yield (size, *in_order(combination))
