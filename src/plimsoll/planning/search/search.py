"""The search for the fastest combination that fits, over all techniques and micro-batches at once, with its fallbacks.

Tracing a combination is exact but slow, so the search traces few:

- the plain training at two or three micro-batches
- each technique that can reduce a large part of the peak, with its strongest option, on top of the plain training
- the combinations that a surrogate (`plimsoll.planning.search.surrogate`) guesses to be the fastest that fit, until the
  best guess has been traced

The chosen combination has always been traced. Weaker options of a technique are traced once they may be part of the
plan. Options that may be faster are traced once a combination fits. Every trace is also counted with each heap (on
CUDA, each allocator setting), which costs little. Each heap has a separate surrogate. If the plain training fits and
more memory could not make it faster, only techniques that may be faster are traced.

The search is deterministic: it uses no random numbers and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain, combinations
from math import isqrt

import numpy as np

from plimsoll.memory.lowering.cudnn_rnn import MOST_STEPS
from plimsoll.planning.search.block_options import BY_BLOCKS
from plimsoll.planning.search.choices import (
    AvailableChoices,
    Compatibility,
    Problem,
    available_choices,
    lossy_alternatives_of,
)
from plimsoll.planning.search.combinations import LEAST_PART, SAME_BYTES, Combination, all_on_top, least_of, whole
from plimsoll.planning.search.evaluation import Evaluate, Evaluation, Found, heap_of, in_heap
from plimsoll.planning.search.knowledge import Known
from plimsoll.planning.search.near_best import FALLS_SHARE, can_follow, candidates_beside
from plimsoll.planning.search.prefetch import Expect, Likely, Suppose, asked_in_turn, not_traced
from plimsoll.planning.search.reasons import SAME_SECONDS, rejected
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.trace import Phase
from plimsoll.techniques import Choices, in_order, technique_of

_MOST_EVALUATIONS = 8  # number of combinations that are evaluated for the plan
_MOST_LEANEST_EVALUATIONS = 2  # to find the leanest combination, after a descent
_SLOW = 1.1  # relative to the time of the whole batch: if a step is slower, its passes are too small
_MAY_BE_AS_FAST = 1.1  # relative to the time of the fastest: a combination with a higher guess counts as slower
# Guesses for many techniques at once are up to a third too high. A combination is also traced if its guessed need is
# below _FAR_OFF times the limit and its guessed time below _MUCH_FASTER times the plan's time. These traces end after
# _MOST_MISSED failures in a row.
_FAR_OFF, _MUCH_FASTER, _MOST_MISSED = 1.25, 0.95, 3
_NEAR_SHARE = 0.5  # share of the limit: if a plan needs less, no further techniques are traced for its fallbacks
# Needs of fallbacks, as shares of the plan's need. The first shares are close to 1, because most out-of-memory failures
# lack little memory. The leanest fallback is for larger shortages.
_FALLBACK_SHARES = (0.9, 0.75, 0.6)


def search(
    problem: Problem,
    evaluate: Evaluate,
    expect: Expect = lambda combinations: None,
    at_length: Evaluate | None = None,
    suppose: Suppose = lambda combinations: None,
) -> Found:
    """Find the fastest combination that fits.

    Args:
        problem: the training run, the limit, and the user's constraints.
        evaluate: traces and evaluates a combination.
        expect: called with combinations that are certain to be traced, so that they can be traced in parallel.
        at_length: evaluates a combination over enough steps to include everything that the training does, such as an
            evaluation. The chosen combination fits in this longer dry run, too. ``None`` relies on ``evaluate``.
        suppose: called with combinations that may be traced next, so that idle processes can begin them.

    Raises:
        InputError: if the pinned choices contradict each other, or the training.
    """
    return _Search(problem, evaluate, expect, at_length, suppose).found()


class _Search:
    def __init__(
        self, problem: Problem, evaluate: Evaluate, expect: Expect, at_length: Evaluate | None, suppose: Suppose
    ) -> None:
        self._problem = problem
        self._available: AvailableChoices = available_choices(problem)
        self._compatibility = Compatibility(problem)
        self._known = Known(self._available, problem.decided.required, self._compatibility.allows)
        self._evaluator, self._expect, self._at_length, self._suppose = evaluate, expect, at_length, suppose
        self._usual_heap = heap_of(self._available.base)
        self._reference: Evaluation
        self._asked: set[str] = set()
        self._num_missed = 0  # consecutive evaluations that did not give a better plan

    def found(self) -> Found:
        """Run the search, and return its result."""
        limit_bytes = self._problem.limit_bytes
        plain = self._evaluate(self._needed_to_run(), self._problem.setting.batch_size)
        self._plain_line(limit_bytes)
        chosen = self._fastest(limit_bytes)
        if chosen is None:
            leanest = self._leanest()
            return self._result(leanest, (), plain, fits=False, lossy_alternatives=self._lossy_alternatives(leanest))
        chosen, fallbacks = self._around(chosen)
        return self._result(chosen, fallbacks, plain, fits=True, lossy_alternatives=())

    def _around(self, chosen: Evaluation) -> tuple[Evaluation, tuple[Evaluation, ...]]:
        """Return the combination to use, which may be better than ``chosen``, and its fallbacks."""
        limit_bytes = self._problem.limit_bytes
        chosen = self._stretched(chosen, limit_bytes)
        self._evaluate_beside(chosen)
        faster = self._traced_within(limit_bytes, None)
        if faster is not None and faster.seconds < (1 - SAME_SECONDS) * chosen.seconds and self._holds(faster.choices):
            chosen = faster
        return chosen, tuple(self._fallbacks(chosen))

    def _needed_to_run(self) -> Choices:
        """Return the pinned choices that sequences too long for cuDNN need, without which the training cannot run."""
        setting = self._problem.setting
        if setting.device != "cuda" or (setting.sequence_length or 0) <= MOST_STEPS:
            return ()
        return tuple(choice for choice in self._available.base if technique_of(choice.technique).cuts_time)

    def _fastest(self, limit_bytes: int) -> Evaluation | None:
        fits_plainly, may_gain = self._judge_plain(limit_bytes)
        self._learn_techniques(only_faster=fits_plainly and not may_gain)
        chosen = self._best_within(limit_bytes)
        if chosen is None and fits_plainly and not may_gain:
            self._learn_techniques()
            chosen = self._best_within(limit_bytes)
        if chosen is None and self._descend(limit_bytes):
            chosen = self._best_within(limit_bytes)
        return chosen

    # -- looking ahead -------------------------------------------------------------------------------------------------

    def _likely(self, choices: Choices | None = None) -> Iterator[Likely]:
        """Yield the combinations that the search requests next, if each result is as guessed."""
        ahead = copy(self)
        known, at_length = self._known.copied(), dict[Choices, Evaluation]()
        ahead._known, ahead._evaluator, ahead._suppose = known, not_traced, lambda combinations: None
        ahead._at_length = lambda choices: at_length.setdefault(choices, known.evaluations[choices])
        if choices is not None:
            known.take_guess(choices)
        yield from asked_in_turn(ahead._go_on, known.take_guess, at_length)

    def _go_on(self) -> None:
        """Continue the search from the point where the effects of all techniques are learned."""
        chosen = self._best_within(self._problem.limit_bytes)
        if chosen is None:
            self._leanest()
        else:
            self._around(chosen)

    # -- evaluating ----------------------------------------------------------------------------------------------------

    def _evaluate(self, combination: Choices, micro_batch: int) -> Evaluation:
        return self._evaluate_choices(whole(combination, micro_batch))

    def _evaluate_choices(self, choices: Choices) -> Evaluation:
        if choices not in self._known.evaluations:
            self._known.evaluations[choices] = self._evaluator(choices)
        return self._known.evaluations[choices]

    def _plain_line(self, limit_bytes: int) -> None:
        """Trace the base (the choices that are in every combination) at a few micro-batches.

        The smallest of them is a size at which the base is expected to fit. Its evaluation becomes the reference for
        judging techniques.
        """
        base, sizes = self._available.base, self._available.sizes
        large = self._evaluate(base, sizes[0])
        # The bytes that grow with the batch get a proportional share of the allocator's fragmentation.
        alive_bytes = large.need_bytes - large.parts.get("fragmentation", 0)
        growing_bytes = large.largest_phase.growing_bytes * large.need_bytes / max(alive_bytes, 1)
        fitting_share = (limit_bytes - large.need_bytes + growing_bytes) / max(growing_bytes, 1)  # of the whole batch
        wanted = max(1, min(int(0.9 * fitting_share * sizes[0]), sizes[0] // 2))
        smaller = max(size for size in sizes if size <= max(wanted, sizes[-1]))
        self._reference = learned = small = self._evaluate(base, smaller)
        evaluations = {smaller: small, sizes[0]: large}
        middle = max(size for size in sizes if size <= max(isqrt(smaller * sizes[0]), smaller))
        if middle > 2 * smaller and small.seconds > _SLOW * large.seconds:
            # Small passes are dominated by call overhead. Learn techniques at the size at which they would be used.
            evaluations[middle] = self._evaluate(base, middle)
            learned = evaluations[middle] if self._is_faster(evaluations[middle]) else small
        self._plain_evaluations, self._learned_at = tuple(evaluations.values()), learned.micro_batch
        offered = {name: one for name, one in self._available.options.items() if not technique_of(name).is_traced}
        allowed = {name: tuple(filter(self._goes_with_base, choices)) for name, choices in offered.items()}
        heaps = tuple(chain.from_iterable(allowed.values()))
        for heap in (self._usual_heap, *heaps):
            counted = [self._evaluate_choices(in_heap(evaluation.choices, heap)) for evaluation in evaluations.values()]
            self._known.surrogates[heap] = Surrogate(counted)
        self._asked.update(offered)
        self._known.learned.update({name: list(choices) for name, choices in allowed.items() if choices})

    def _goes_with_base(self, choice: Choice) -> bool:
        return self._compatibility.allows(in_order((*self._available.base, choice)))

    def _judge_plain(self, limit_bytes: int) -> tuple[bool, bool]:
        """Return whether the base fits, and whether more memory could make it measurably faster."""
        guesses = self._known.guesses([Combination(self._available.base, np.asarray(self._available.sizes))])
        fits, seconds = guesses.needs <= limit_bytes, guesses.seconds
        if not fits.any():
            return False, True
        return True, bool(seconds[fits].min() > (1 + SAME_SECONDS) * seconds.min())

    def _learn_techniques(self, only_faster: bool = False) -> None:
        """Trace the techniques that may be faster or can reduce a large part of the reference's peak."""
        wanted = [name for name in self._available.options if self._may_be_of_use(name, only_faster)]
        self._asked.update(wanted)
        useful = self._learn_each([self._available.options[name][-1] for name in wanted])
        for name in wanted:
            technique, options = technique_of(name), self._available.options[name]
            *others, strongest = options
            learned = [strongest] if strongest in useful else []
            if name == BY_BLOCKS:
                learned += self._known.blocks(self._problem, strongest) if learned else []
            elif not learned:
                learned += filter(self._learn, others[:1])
            elif technique.may_be_faster:
                learned += self._known.suppose(others, strongest)
            elif not self._known.surrogates[self._usual_heap].is_free(strongest):
                learned += self._known.suppose(others[:1], strongest)
            if learned:
                self._known.learned[name] = learned
        if not only_faster:
            self._learn_pairs([self._available.options[name][-1] for name in wanted if name in self._known.learned])

    def _learn_pairs(self, choices: Sequence[Choice]) -> None:
        """Trace pairs of choices that save memory of the same category, because their savings may overlap."""
        self._expect(list(self._pairs(choices)))
        self._suppose(self._likely())
        for first, second in _alike(choices):
            for heap, surrogate in self._known.surrogates.items():
                combination = in_heap(whole((*self._available.base, first, second), self._learned_at), heap)
                if self._compatibility.allows(combination):
                    surrogate.learn_pair(first, second, self._evaluate_choices(combination))

    def _pairs(self, choices: Sequence[Choice]) -> Iterator[Choices]:
        """Yield the combination to trace for each pair of choices that save memory of the same category."""
        combinations = (whole((*self._available.base, *pair), self._learned_at) for pair in _alike(choices))
        return filter(self._compatibility.allows, combinations)

    def _may_be_of_use(self, name: str, only_faster: bool) -> bool:
        technique = technique_of(name)
        evaluations = [self._reference, *filter(self._is_faster, self._plain_evaluations)]
        reached_shares = (
            sum(evaluation.parts.get(part, 0) for part in technique.reaches) / evaluation.need_bytes
            for evaluation in evaluations
        )
        may_help = not only_faster and max(reached_shares) >= LEAST_PART
        if technique.only_in and not self._is_peak_of(technique.only_in):
            may_help = False
        may_be_faster = technique.may_be_faster and not (
            technique.only_in and self._problem.update_seconds < SAME_SECONDS * self._reference.seconds
        )
        is_wanted = may_help or may_be_faster or name in self._problem.decided.required
        return is_wanted and name not in self._asked

    def _is_peak_of(self, phases: frozenset[Phase]) -> bool:
        """Return whether the reference may exceed the limit in the given phases."""
        most = {phase: peak.fixed_bytes + peak.growing_bytes for phase, peak in self._reference.phases.items()}
        share = max((most[phase] for phase in phases & most.keys()), default=0) / max(most.values())
        return share * self._reference.need_bytes > self._problem.limit_bytes

    def _is_faster(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation of the base with a larger micro-batch is faster than the reference."""
        return evaluation.seconds * (1 + SAME_SECONDS) < self._reference.seconds

    def _learn_each(self, choices: Sequence[Choice]) -> list[Choice]:
        """Trace several choices, each on top of the base, and return the useful choices."""
        sizes = [(choice, self._samples_to_learn(choice)) for choice in choices]
        self._expect([whole((*self._available.base, choice), size) for choice, size in sizes if size is not None])
        self._suppose((combination, False) for combination in self._pairs(choices))
        return list(filter(self._learn, choices))

    def _learn(self, choice: Choice) -> bool:
        """Trace one choice on top of the base, and return whether it is useful."""
        size = self._samples_to_learn(choice)
        return size is not None and (self._learn_at(choice, size) or choice.technique in self._problem.decided.required)

    def _samples_to_learn(self, choice: Choice) -> int | None:
        """Return the micro-batch at which to trace a choice on top of the base, or ``None`` if no size is possible."""
        base, reaches = self._available.base, technique_of(choice.technique).reaches
        nearer = (self._learned_at, self._reference.micro_batch)
        for size in dict.fromkeys((*nearer, self._available.sizes[0])):
            without = self._evaluate(base, size)
            left_bytes = without.need_bytes - sum(without.parts.get(category, 0) for category in reaches)
            if size not in nearer and left_bytes > self._problem.limit_bytes:
                continue  # the whole batch would not fit even if the choice saved all bytes that it can reduce
            if self._compatibility.allows(whole((*base, choice), size)):
                return size
        return None

    def _learn_at(self, choice: Choice, micro_batch: int) -> bool:
        base, is_useful, reaches = self._available.base, False, technique_of(choice.technique).reaches
        for heap, surrogate in self._known.surrogates.items():
            combination = () if heap == self._usual_heap else (heap,)
            if self._compatibility.allows(in_order((*base, choice, *combination))):
                evaluation = self._evaluate((*base, choice, *combination), micro_batch)
                surrogate.learn_effect(choice, evaluation, self._evaluate((*base, *combination), micro_batch), reaches)
                is_useful |= surrogate.is_useful(choice)
        return is_useful

    def _descend(self, limit_bytes: int) -> bool:
        """Add techniques to the leanest guess, one by one, until the combination fits or no technique helps.

        Return whether a combination fits. A guess does not know the effect of a technique if other techniques move the
        peak to another phase. Such combinations are therefore traced before the search gives up. The whole batch is
        tried as well, because some techniques do not work with micro-batches.
        """
        strongest = {name: options[-1] for name, options in self._available.options.items()}
        for size in dict.fromkeys((self._reference.micro_batch, self._available.sizes[0])):
            combinations = [
                Combination(combination.choices, np.asarray([size]))
                for combination in self._known.learned_combinations()
                if size in combination.sizes
            ]
            if not combinations:
                continue
            needs = self._known.guesses(combinations).needs
            ranks = (
                (need, len(combination.choices), str(combination.choices))
                for need, combination in zip(needs, combinations, strict=True)
            )
            least = min(zip(ranks, combinations, strict=True), key=lambda one: one[0])[1].choices
            used = {choice.technique for choice in least}
            rest = {name: choice for name, choice in strongest.items() if name not in used}
            evaluation: Evaluation | None = self._evaluate(least, size)
            while evaluation is not None and evaluation.need_bytes > limit_bytes:
                evaluation = self._next_down(evaluation, rest)
            if evaluation is not None:
                return True
        return False

    def _next_down(self, evaluation: Evaluation, rest: dict[str, Choice]) -> Evaluation | None:
        """Return the evaluation with one more technique that reduces the memory need, or ``None`` if none helps.

        Techniques that can reduce most of the peak are tried first. Tried techniques leave ``rest``.
        """
        reached = {name: sum(evaluation.parts.get(part, 0) for part in technique_of(name).reaches) for name in rest}
        least_bytes = SAME_BYTES * evaluation.need_bytes
        for name in sorted(rest, key=lambda name: -reached[name]):
            if reached[name] < least_bytes:
                break
            choice = rest.pop(name)
            combination = in_order((*evaluation.combination, choice))
            if self._compatibility.allows((micro_batch_choice(evaluation.micro_batch), *combination)):
                following = self._evaluate(combination, evaluation.micro_batch)
                if following.need_bytes < evaluation.need_bytes - least_bytes:
                    return following
        return None

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _best_within(self, limit_bytes: int) -> Evaluation | None:
        """Return the fastest traced combination that fits, or ``None``."""
        for _ in range(_MOST_EVALUATIONS):
            best = self._known.best_guess(self._known.telling_combinations(), limit_bytes)
            if best is None:
                break
            if best in self._known.evaluations:
                simpler = self._simpler(self._known.evaluations[best], limit_bytes)
                if simpler is None and self._holds(best):
                    return self._known.evaluations[best]
                if simpler is None:
                    continue
                best = simpler
            self._correct(best)
        return self._traced_within(limit_bytes, None)

    def _stretched(self, chosen: Evaluation, limit_bytes: int) -> Evaluation:
        """Trace combinations guessed to be much faster than ``chosen`` that may fit, despite their guessed memory need.

        Return the fastest combination that fits, which is ``chosen`` if no traced combination is faster.
        """
        while self._num_missed < _MOST_MISSED:
            guesses = self._known.guesses(self._known.combinations())
            may_be = guesses.possible & ~guesses.traced & (guesses.needs <= _FAR_OFF * limit_bytes)
            rows = np.flatnonzero(may_be & (guesses.seconds < _MUCH_FASTER * chosen.seconds))
            if not len(rows):
                break
            best = guesses.choices(int(rows[guesses.needs[rows].argmin()]))
            self._num_missed += 1
            self._correct(best)
            found = self._traced_within(limit_bytes, None)
            if found is not None and found.seconds < chosen.seconds and self._holds(found.choices):
                chosen, self._num_missed = found, 0
        return chosen

    def _holds(self, choices: Choices) -> bool:
        """Return whether a combination fits in a full-length dry run; if not, store the evaluation of that dry run."""
        at_length = self._known.evaluations[choices] if self._at_length is None else self._at_length(choices)
        if at_length.fits and at_length.need_bytes <= self._problem.limit_bytes + self._problem.margin_bytes:
            return True
        self._known.evaluations[choices] = at_length
        self._known.surrogates[heap_of(choices)].correct(at_length)
        return False

    def _traced_within(self, limit_bytes: int, after: Choices | None) -> Evaluation | None:
        evaluations = [
            evaluation
            for evaluation in self._known.evaluations.values()
            if evaluation.fits and evaluation.need_bytes <= limit_bytes
        ]
        return min(
            (evaluation for evaluation in evaluations if self._can_be(evaluation, after)),
            key=lambda evaluation: evaluation.seconds,
            default=None,
        )

    def _simpler(self, evaluation: Evaluation, limit_bytes: int) -> Choices | None:
        """Return an untraced combination with one choice fewer that may be as fast, or ``None``.

        Its guessed step time may be slightly longer, because guesses have an error.
        """
        shorter = [
            combination
            for combination in self._known.combinations()
            if len(combination.choices) == len(evaluation.combination) - 1
        ]
        less = [combination for combination in shorter if set(combination.choices) < set(evaluation.combination)]
        if not less:
            return None
        guesses = self._known.guesses(less)
        may_be = (guesses.sizes == evaluation.micro_batch) & (guesses.needs <= limit_bytes)
        rows = np.flatnonzero(may_be & (guesses.seconds <= _MAY_BE_AS_FAST * evaluation.seconds))
        return next((one for one in map(guesses.choices, rows.tolist()) if one not in self._known.evaluations), None)

    def _correct(self, choices: Choices) -> None:
        """Evaluate choices with each heap, and correct the surrogates."""
        if in_heap(choices, self._usual_heap) not in self._known.evaluations:
            self._suppose(self._likely(choices))
        for heap, surrogate in self._known.surrogates.items():
            alike = in_heap(choices, heap)
            if self._compatibility.allows(alike):
                surrogate.correct(self._evaluate_choices(alike))
        self._known.only_guessed.difference_update(choices)

    def _can_be(self, evaluation: Evaluation, after: Choices | None) -> bool:
        """Return whether an evaluation satisfies the constraints of every plan and can follow ``after``."""
        names = {choice.technique for choice in evaluation.combination}
        has_size = evaluation.micro_batch in self._available.sizes
        has_all = set(self._available.base) <= set(evaluation.combination) and self._problem.decided.required <= names
        return has_size and has_all and (after is None or can_follow(after, evaluation.combination))

    def _evaluate_beside(self, chosen: Evaluation) -> None:
        """Trace a similarly fast combination with another micro-batch that probably fits, as a trial candidate."""
        most_seconds, combinations = (1 + SAME_SECONDS) * chosen.seconds, self._known.learned_combinations()
        guesses = self._known.guesses(combinations)
        alike = {
            heap: self._evaluate_choices(in_heap(self._reference.choices, heap)) for heap in self._known.surrogates
        }
        likely = {heap: evaluation.peak.likely_bytes / evaluation.need_bytes for heap, evaluation in alike.items()}
        needs = (
            guesses.needs
            * np.asarray([likely[heap_of(combination.choices)] for combination in combinations])[guesses.numbers]
        )
        fits = (needs <= self._problem.limit_bytes) & (guesses.seconds <= most_seconds) & guesses.possible
        rows = np.flatnonzero(fits & (guesses.sizes != chosen.micro_batch))
        if len(rows) and not guesses.traced[rows].any():
            self._correct(guesses.choices(int(rows[guesses.seconds[rows].argmin()])))

    # -- fallbacks and alternatives ------------------------------------------------------------------------------------

    def _fallbacks(self, chosen: Evaluation) -> Iterator[Evaluation]:
        """Yield the fallbacks of a plan, in order of falling memory need.

        For each of several fractions of the plan's need, take the fastest known combination that needs no more. Then
        take the leanest combination.

        Fallbacks need not be optimal, so the traces that were made for the plan are used. One more trace, with all
        remaining techniques together, shows how far the need can fall.
        """
        last, is_near = chosen, chosen.need_bytes > _NEAR_SHARE * self._problem.limit_bytes
        for share in _FALLBACK_SHARES if is_near else _FALLBACK_SHARES[-1:]:
            limit_bytes = int(share * chosen.need_bytes)
            following = last if last.need_bytes <= limit_bytes else self._traced_within(limit_bytes, last.combination)
            if following is not None and following is not last:
                yield following
                last = following
        is_wanted = is_near or last is chosen
        combination = all_on_top(last, self._available, self._compatibility.allows) if is_wanted else last.combination
        leanest = self._least_after(last, combination)
        if leanest.need_bytes < FALLS_SHARE * last.need_bytes:
            yield leanest
            last = leanest
        single = (micro_batch_choice(self._available.sizes[-1]), *last.combination)
        if last.micro_batch > self._available.sizes[-1] and self._compatibility.allows(single):
            evaluation = self._evaluate_choices(single)  # last resort, if activations need more than predicted
            if evaluation.need_bytes < last.need_bytes:
                yield evaluation

    def _least_after(self, evaluation: Evaluation, combination: Choices) -> Evaluation:
        """Trace a combination at the smallest micro-batch. Return the leanest successor of ``evaluation``."""
        if combination != evaluation.combination:
            self._suppose(self._likely(whole(combination, self._available.sizes[-1])))
            self._evaluate(combination, self._available.sizes[-1])
        return least_of(
            one for one in self._known.evaluations.values() if one.fits and self._can_be(one, evaluation.combination)
        )

    def _leanest(self) -> Evaluation:
        """Return the leanest combination, traced. If needs are nearly equal, prefer fewer techniques."""
        combinations = self._known.learned_combinations()
        for _ in range(_MOST_LEANEST_EVALUATIONS if combinations else 0):
            guesses = self._known.guesses(combinations)
            best = guesses.leanest()
            if best in self._known.evaluations:
                break
            self._correct(best)
        return least_of(evaluation for evaluation in self._known.evaluations.values() if self._can_be(evaluation, None))

    def _lossy_alternatives(self, leanest: Evaluation) -> tuple[Evaluation, ...]:
        """Return the combinations with a lossy choice, not allowed by the user, that need less than ``leanest``.

        Each keeps the choices of ``leanest`` that are compatible with the lossy choice.
        """
        evaluations = map(self._evaluator, lossy_alternatives_of(self._problem, self._available, leanest.choices))
        return tuple(
            evaluation for evaluation in evaluations if evaluation.need_bytes < (1 - SAME_BYTES) * leanest.need_bytes
        )

    def _result(
        self,
        chosen: Evaluation,
        fallbacks: tuple[Evaluation, ...],
        plain: Evaluation,
        *,
        fits: bool,
        lossy_alternatives: tuple[Evaluation, ...],
    ) -> Found:
        ours = in_heap(chosen.choices, self._usual_heap)
        others = [
            evaluation
            for evaluation in self._known.evaluations.values()
            if evaluation is not chosen
            and evaluation not in fallbacks
            and (
                heap_of(evaluation.choices) == self._usual_heap or in_heap(evaluation.choices, self._usual_heap) == ours
            )
        ]
        reasons = [rejected(evaluation, chosen, self._problem) for evaluation in others]
        possible = [evaluation for evaluation in self._known.evaluations.values() if self._can_be(evaluation, None)]
        candidates = candidates_beside(chosen, fallbacks, possible, self._problem.limit_bytes) if fits else ()
        reasons += self._available.rejected
        return Found(chosen, fallbacks, plain, fits, tuple(reasons), lossy_alternatives, candidates)


def _alike(choices: Sequence[Choice]) -> Iterator[tuple[Choice, Choice]]:
    """Yield the pairs of choices that can reduce only one category, the same for both."""
    for first, second in combinations(choices, 2):
        reaches = technique_of(first.technique).reaches
        if len(reaches) == 1 and reaches == technique_of(second.technique).reaches:
            yield first, second
