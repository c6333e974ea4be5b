"""Which mix: the fastest that fits, jointly over all techniques and micro-batches, and the smaller ones behind it.

A trace of a mix is exact and slow, so few are made: the plain training at two or three micro-batches, each technique that
can reach what the peak is made of once on top of it, and then the mixes that a surrogate (`plimsoll.plan.surrogate`)
takes for the fastest that fit, until the best guess is one that has been traced. Nothing is chosen untraced. If no mix
can gain more than the model of time can tell, the techniques are not traced at all.

The same problem always has the same plan: nothing is drawn, and nothing depends on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import isqrt

import numpy as np

from plimsoll.plan.blocks import some_blocks
from plimsoll.plan.look import Look, LookAt, PhasePeak
from plimsoll.plan.menu import Compatibility, Menu, Problem, menu_of
from plimsoll.plan.surrogate import Column, Surrogate
from plimsoll.records.plan import Choice, Rejected, micro_batch_choice
from plimsoll.records.units import format_bytes
from plimsoll.techniques import Choices, in_order, technique_of

Refine = Callable[[Look, int], Choices | None]
"""A weaker mix that uses the room that is left under a limit (bytes), or ``None``."""

_SAME_BYTES = 0.01  # of a need: not worth another technique
_SAME_SECONDS = 0.02  # of a step: the model of time cannot tell plans that differ by less
_LEAST_PART = 0.02  # of a peak: what is less is not worth a trace
_MOST_LOOKS = 10  # at mixes, for the plan and for each fallback
_NEAR_SHARE = 0.5  # of the limit: a plan that needs less is not traced with techniques for its fallbacks
_FALLBACK_SHARES = (0.8, 0.6, 0.45, 0.3)  # of what the plan needs


@dataclass(frozen=True)
class Found:
    """The mix in force and its fallbacks; ``fits`` is False if ``chosen`` is only what needs least."""

    chosen: Look
    fallbacks: tuple[Look, ...]
    plain: Look
    fits: bool
    rejected: tuple[Rejected, ...]
    openings: tuple[Look, ...]
    num_looks: int


def search(problem: Problem, look_at: LookAt) -> Found:
    """Find the fastest mix that fits.

    Args:
        problem: the training, the limit, and what is decided already.
        look_at: traces a mix.

    Raises:
        InputError: if the pinned choices contradict each other, or the training.
    """
    return _Search(problem, look_at).found()


@dataclass(frozen=True)
class _Mix:
    """Choices but for the micro-batch, and the sizes (samples) it can have with them."""

    choices: Choices
    sizes: Column

    def with_sizes(self) -> list[Choices]:
        """The whole choices, one for each size."""
        return [(micro_batch_choice(size), *self.choices) for size in self.sizes.tolist()]


class _Search:
    def __init__(self, problem: Problem, look_at: LookAt) -> None:
        self._problem = problem
        self._menu: Menu = menu_of(problem)
        self._compatibility = Compatibility(problem)
        self._look_at = look_at
        self._looks: dict[Choices, Look] = {}
        self._surrogate: Surrogate
        self._learned: dict[str, list[Choice]] = {}

    def found(self) -> Found:
        """Search."""
        limit_bytes = self._problem.limit_bytes
        plain = self._look((), self._problem.setting.batch_size)
        reference = self._plain_line(limit_bytes)
        if self._may_gain(limit_bytes):
            self._learn_techniques(reference)
        chosen = self._best_within(limit_bytes)
        if chosen is None and not self._learned:
            self._learn_techniques(reference)
            chosen = self._best_within(limit_bytes)
        if chosen is None:
            leanest = self._leanest()
            return self._result(leanest, (), plain, fits=False, openings=self._openings(leanest))
        return self._result(chosen, tuple(self._fallbacks(chosen)), plain, fits=True, openings=())

    # -- looking -------------------------------------------------------------------------------------------------------

    def _look(self, mix: Choices, micro_batch: int) -> Look:
        return self._look_at_choices((micro_batch_choice(micro_batch), *in_order(mix)))

    def _look_at_choices(self, choices: Choices) -> Look:
        if choices not in self._looks:
            self._looks[choices] = self._look_at(choices)
        return self._looks[choices]

    def _plain_line(self, limit_bytes: int) -> Look:
        """Trace the base at a few micro-batches, one near where it stops fitting; returns the smallest one."""
        base, sizes = self._menu.base, self._menu.sizes
        large = self._look(base, sizes[0])
        growing_bytes = _largest(large).growing_bytes
        room = (limit_bytes - large.need_bytes + growing_bytes) / max(growing_bytes, 1)  # of the whole batch
        wanted = max(1, min(int(0.9 * room * sizes[0]), sizes[0] // 2))
        small = self._look(base, max(size for size in sizes if size <= max(wanted, sizes[-1])))
        middle = isqrt(small.micro_batch * large.micro_batch)
        if middle > 2 * small.micro_batch:
            looks = (small, self._look(base, max(size for size in sizes if size <= middle)), large)
        else:
            looks = (small, large)
        self._surrogate = Surrogate(looks)
        return small

    def _may_gain(self, limit_bytes: int) -> bool:
        """Whether a technique could make the plan faster than the base at its best size, by more than can be told."""
        needs, seconds, _ = self._guessed(_Mix(self._menu.base, np.asarray(self._menu.sizes)))
        may_be_faster = any(technique_of(name).may_be_faster for name in self._menu.options)
        if self._problem.decided.required or may_be_faster or needs.min() > limit_bytes:
            return True
        return bool(seconds[needs <= limit_bytes].min() > (1 + _SAME_SECONDS) * seconds.min())

    def _learn_techniques(self, reference: Look) -> None:
        for name, options in self._menu.options.items():
            technique = technique_of(name)
            reached_bytes = sum(reference.parts.get(category, 0) for category in technique.reaches)
            is_wanted = technique.may_be_faster or name in self._problem.decided.required
            if reached_bytes < _LEAST_PART * reference.need_bytes and not is_wanted:
                continue
            for choice in dict.fromkeys((options[0], options[-1])):
                self._learn(choice, reference.micro_batch)
            if name == "checkpointing":
                self._learn_blocks(options[-1])

    def _learn_blocks(self, every_block: Choice) -> None:
        """Guess what some of the blocks do from what all of them do."""
        problem, learned = self._problem, self._learned.get("checkpointing", [])
        if every_block in learned and problem.setting.trace is not None:
            for some in some_blocks(problem.workload, problem.setting.trace):
                self._surrogate.interpolate(some.choice, every_block, some.bytes_share, some.seconds_share)
                learned.append(some.choice)

    def _learn(self, choice: Choice, micro_batch: int) -> None:
        base = self._menu.base
        for size in (micro_batch, self._menu.sizes[0]):
            if self._compatibility.allows((micro_batch_choice(size), *in_order((*base, choice)))):
                look = self._look((*base, choice), size)
                self._surrogate.learn_effect(choice, look, self._look(base, size))
                if self._surrogate.is_useful(choice) or choice.technique in self._problem.decided.required:
                    self._learned.setdefault(choice.technique, []).append(choice)
                return

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _mixes(self, only_with: Choices | None = None) -> list[_Mix]:
        """Every mix of what was learned, with the sizes it can have; ``only_with`` says what is for the whole run."""
        base, required = self._menu.base, self._problem.decided.required
        menus = [choices if name in required else [None, *choices] for name, choices in self._learned.items()]
        found = []
        for picked in product(*menus):
            mix = in_order((*base, *(choice for choice in picked if choice is not None)))
            if (only_with is not None and _for_the_run(mix) != only_with) or not self._compatibility.allows(mix):
                continue
            allows = self._compatibility.allows
            sizes = [
                size
                for size in self._menu.sizes
                if all(allows((micro_batch_choice(size), choice)) for choice in mix or base)
            ]
            if sizes:
                found.append(_Mix(mix, np.asarray(sizes)))
        return found

    def _guessed(self, mix: _Mix) -> tuple[Column, Column, Column]:
        """Of each size of a mix, the need and the seconds as guessed or traced, and whether it is possible."""
        needs = self._surrogate.need_bytes(mix.choices, mix.sizes)
        seconds = self._surrogate.seconds(mix.choices, mix.sizes)
        possible = np.ones(len(mix.sizes), dtype=bool)
        for row, look in enumerate(map(self._looks.get, mix.with_sizes())):
            if look is not None:
                needs[row], seconds[row], possible[row] = look.need_bytes, look.seconds, look.fits
        return needs, seconds, possible

    def _best_within(self, limit_bytes: int, only_with: Choices | None = None) -> Look | None:
        """The fastest mix that fits, traced; ``None`` if none is found."""
        mixes = self._mixes(only_with)
        for _ in range(_MOST_LOOKS):
            best = self._best_guess(mixes, limit_bytes)
            if best is None:
                return None
            if best in self._looks:
                return self._looks[best]
            self._surrogate.correct(self._look_at_choices(best))
        fitting = [look for look in self._looks.values() if look.fits and look.need_bytes <= limit_bytes]
        fitting = [look for look in fitting if only_with is None or _for_the_run(look.mix) == only_with]
        return min(fitting, key=lambda look: look.seconds, default=None)

    def _best_guess(self, mixes: list[_Mix], limit_bytes: int) -> Choices | None:
        """The choices to take: of those about as fast as the fastest, the fewest techniques, then the largest size."""
        fitting: list[tuple[float, _Mix, int]] = []
        for mix in mixes:
            needs, seconds, possible = self._guessed(mix)
            fits = np.flatnonzero((needs <= limit_bytes) & possible)
            fitting += [(float(seconds[row]), mix, int(row)) for row in fits]
        if not fitting:
            return None
        fastest = min(seconds for seconds, _, _ in fitting)
        bound = fastest + _SAME_SECONDS * abs(fastest)  # a guess may be below 0
        near = [
            (len(mix.choices), -mix.sizes[row], seconds, mix, row) for seconds, mix, row in fitting if seconds <= bound
        ]
        best = min(near, key=lambda one: (*one[:3], str(one[3].choices)))
        return best[3].with_sizes()[best[4]]

    # -- what is behind the plan ---------------------------------------------------------------------------------------

    def _fallbacks(self, chosen: Look) -> Iterator[Look]:
        """Smaller plans, each the fastest within a share of what the chosen one needs, until nothing is smaller."""
        last = chosen
        for share in _FALLBACK_SHARES:
            limit_bytes = int(share * chosen.need_bytes)
            if last.need_bytes <= limit_bytes:
                continue
            following = self._best_within(limit_bytes, _for_the_run(chosen.mix))
            if following is None and not self._learned and chosen.need_bytes > _NEAR_SHARE * self._problem.limit_bytes:
                self._learn_techniques(last)
                following = self._best_within(limit_bytes, _for_the_run(chosen.mix))
            if following is None:
                break
            yield following
            last = following
        leanest = self._leanest(_for_the_run(chosen.mix))
        if leanest.need_bytes < last.need_bytes:
            yield leanest

    def _leanest(self, only_with: Choices | None = None) -> Look:
        """The mix that needs least, traced."""
        mixes = self._mixes(only_with)
        for _ in range(_MOST_LOOKS):
            needs = [
                (need, len(mix.choices), second, mix.with_sizes()[row])
                for mix in mixes
                for row, (need, second) in enumerate(zip(*self._guessed(mix)[:2], strict=True))
            ]
            bound = (1 + _SAME_BYTES) * min(need for need, *_ in needs)
            best = min((one for one in needs if one[0] <= bound), key=lambda one: (*one[1:3], str(one[3])))[3]
            if best in self._looks:
                break
            self._surrogate.correct(self._look_at_choices(best))
        looks = [look for look in self._looks.values() if only_with is None or _for_the_run(look.mix) == only_with]
        looks = [look for look in looks if set(self._menu.base) <= set(look.mix)]
        bound = (1 + _SAME_BYTES) * min(look.need_bytes for look in looks)
        return min((look for look in looks if look.need_bytes <= bound), key=lambda look: (len(look.mix), look.seconds))

    def _openings(self, leanest: Look) -> tuple[Look, ...]:
        """What lossy techniques that are not allowed would need on top of the leanest mix."""
        looks = []
        for choice in self._menu.closed:
            mix = in_order((*leanest.mix, choice))
            looks.append(self._look_at((micro_batch_choice(leanest.micro_batch), *mix)))
        return tuple(looks)

    def _result(
        self, chosen: Look, fallbacks: tuple[Look, ...], plain: Look, *, fits: bool, openings: tuple[Look, ...]
    ) -> Found:
        others = [look for look in self._looks.values() if look is not chosen and look not in fallbacks]
        rejected = [_rejected(look, chosen, self._problem.limit_bytes) for look in others]
        return Found(
            chosen,
            fallbacks,
            plain,
            fits,
            (*rejected, *self._menu.rejected),
            openings,
            len(self._looks) + len(openings),
        )


def _rejected(look: Look, chosen: Look, limit_bytes: int) -> Rejected:
    if not look.fits or look.need_bytes > limit_bytes:
        reason = f"needs up to {format_bytes(look.need_bytes)}, more than {format_bytes(limit_bytes)}"
    elif look.seconds > (1 + _SAME_SECONDS) * chosen.seconds:
        reason = f"slower: {look.seconds:.3g} s a step against {chosen.seconds:.3g} s"
    else:
        reason = f"no faster: {look.seconds:.3g} s a step against {chosen.seconds:.3g} s"
    return Rejected(choices=look.choices, reason=reason, peak=look.peak, step_time=look.step_time)


def _for_the_run(mix: Choices) -> Choices:
    return tuple(choice for choice in mix if technique_of(choice.technique).is_for_the_run)


def _largest(look: Look) -> PhasePeak:
    return max(look.phases.values(), key=lambda peak: peak.fixed_bytes + peak.growing_bytes)
