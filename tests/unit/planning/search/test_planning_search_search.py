"""The search in worlds whose best combination is known or found by trying all."""

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from plimsoll.errors import InputError
from plimsoll.planning.search.pins import Decided
from plimsoll.planning.search.search import search
from plimsoll.records.plan import Choice, Duration, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.techniques import conflict_among, in_order
from plimsoll.techniques.micro_batch import sizes_of
from worlds import BATCH_SIZE, MadeUp, World


def searched(world, limit_bytes, decided=Decided((), frozenset(), frozenset()), allow=()):
    """Search, and check that expected traces are made later, and that assumed ones do not change the result."""
    problem, expected, num_asked = world.problem(limit_bytes, decided, allow), [], len(world.asked)

    def expect(combinations):
        assert not set(combinations) & set(expected)
        expected.extend(choices for choices in combinations if choices not in world.asked)

    found = search(problem, world.evaluate, expect)
    assert set(expected) <= set(world.asked)
    asked = world.asked[num_asked:]
    assert search(problem, world.evaluate, suppose=list) == found
    assert world.asked[num_asked:] == [*asked, *asked]
    del world.asked[num_asked + len(asked) :]
    return found, problem


def without_heap(choices):
    return tuple(choice for choice in choices if choice.technique != "heap")


def best_by_trying_all(world, problem):
    """Return the fastest combination that fits, over every technique, option and size."""
    fitting = []
    alternatives = [(None, *technique.choices(None, None)) for technique in world.techniques if not technique.reason]
    for picked in product(*alternatives):
        combination = tuple(choice for choice in picked if choice is not None)
        for size in sizes_of(BATCH_SIZE):
            choices = (micro_batch_choice(size), *in_order(combination))
            if conflict_among(choices, problem.workload, problem.setting) is None:
                evaluation = world.evaluate(choices)
                if evaluation.need_bytes <= problem.limit_bytes:
                    fitting.append(evaluation)
    return min(fitting, key=lambda evaluation: evaluation.seconds, default=None)


def test_where_all_fits_nothing_is_traced_but_the_plain_training(inhabited):
    world = inhabited(World([MadeUp("recompute", (8,), seconds=(0.3,))]))
    found, _ = searched(world, 1000)
    assert found.chosen.choices == (micro_batch_choice(16),)
    assert found.fits
    assert not [choices for choices in world.asked[:2] if len(choices) > 1]  # singles first


def test_a_smaller_micro_batch_comes_before_a_slow_technique(inhabited):
    world = inhabited(World([MadeUp("recompute", (8,), seconds=(0.3,))]))
    found, _ = searched(world, 250)  # the update needs 50 + 200; 10 samples per pass would fit
    assert found.chosen.micro_batch == 8
    assert found.chosen.combination == ()


def test_a_technique_that_saves_passes_may_be_faster_than_small_micro_batches(inhabited):
    world = inhabited(World([MadeUp("cheap", (9,), saves_fixed=100, seconds=(0.001,))]))
    found, _ = searched(world, 175)  # the limit leaves headroom for errors of the guesses
    assert [choice.technique for choice in found.chosen.combination] == ["cheap"]
    assert found.chosen.micro_batch == 16  # a pass needs 116 bytes, so one pass is enough


def test_what_saves_nothing_with_small_passes_is_chosen_where_large_ones_are_faster(inhabited):
    """Within 250 bytes plain passes have 8 samples, and the update is the peak. A pass takes 1 s, recomputing 0.5 s."""
    world = inhabited(World([MadeUp("recompute", (8,), seconds=(0.5,))], pass_seconds=1))
    found, problem = searched(world, 250)
    assert [choice.technique for choice in found.chosen.combination] == ["recompute"]
    assert (found.chosen.micro_batch, found.chosen.seconds) == (16, 1 + 1.5)
    assert found.chosen.seconds == best_by_trying_all(world, problem).seconds


def test_a_technique_that_was_only_guessed_to_save_time_beside_another_is_not_in_the_plan(inhabited):
    """With `recompute` the whole batch fits and takes 2.55 s with or without `graph`, not the guessed 2.6 and 2.7."""

    class ToldByATraceOnly(World):
        def evaluate(self, choices):
            evaluation, seconds = super().evaluate(choices), 2.55
            if evaluation.micro_batch != BATCH_SIZE or "recompute" not in [
                choice.technique for choice in evaluation.combination
            ]:
                return evaluation
            return replace(
                evaluation, step_time=Duration(likely_seconds=seconds, low_seconds=seconds, high_seconds=seconds)
            )

    techniques = [MadeUp("graph", seconds=(-0.15,), may_be_faster=True), MadeUp("recompute", (8,), seconds=(0.25,))]
    found, _ = searched(inhabited(ToldByATraceOnly(techniques, pass_seconds=1)), 250)
    assert [choice.technique for choice in found.chosen.combination] == ["recompute"]
    assert found.chosen.micro_batch == BATCH_SIZE


def test_what_would_be_much_faster_and_is_guessed_not_to_fit_is_traced(inhabited):
    """With both techniques the whole batch needs 10 % less than the sum of their effects, and then fits."""

    class LessTogether(World):
        def evaluate(self, choices):
            evaluation = super().evaluate(choices)
            if evaluation.micro_batch < BATCH_SIZE or len(evaluation.combination) < 2:
                return evaluation
            need_bytes = int(0.9 * evaluation.need_bytes)
            return replace(
                evaluation, peak=Estimate(likely_bytes=need_bytes, low_bytes=need_bytes, high_bytes=need_bytes)
            )

    techniques = [
        MadeUp("cheap", (4,), saves_fixed=60, seconds=(0.001,)),
        MadeUp("recompute", (3,), saves_fixed=60, seconds=(0.002,), reaches=frozenset({"parameters"})),
    ]
    world = inhabited(LessTogether(techniques, pass_seconds=1))
    whole = (micro_batch_choice(BATCH_SIZE), *(Choice(technique=one.name, options={"level": 0}) for one in techniques))
    limit_bytes = world.evaluate(whole).need_bytes + 1
    found, problem = searched(world, limit_bytes)
    assert found.chosen.choices == best_by_trying_all(world, problem).choices == whole


def test_what_does_not_depend_on_one_another_is_expected_together(inhabited):
    """All techniques that may help are traced at once."""
    world, expected = inhabited(World([MadeUp(name, (4,), seconds=(0.1,)) for name in "abc"])), []
    search(world.problem(155), world.evaluate, expected.append)
    learned, *_ = expected
    assert [choices[1].technique for choices in learned] == ["a", "b", "c"]


def test_two_of_one_category_are_supposed_and_then_expected_together(inhabited):
    """Pairs are assumed while single techniques are traced, and their successors while the pairs are traced."""
    world, told = inhabited(World([MadeUp(name, (4,), seconds=(0.1,)) for name in "abc"])), []
    search(
        world.problem(155), world.evaluate, lambda combinations: told.append(("expected", list(combinations))),
        suppose=lambda combinations: told.append(("supposed", [combination for combination, _ in combinations])),
    )  # fmt: skip
    (_, learned), (_, likely), (_, pairs), (last, following), *_ = told
    assert [len(choices) for choices in learned] == [2, 2, 2]
    assert likely == pairs
    assert [[choice.technique for choice in choices[1:]] for choices in pairs] == [list("ab"), list("ac"), list("bc")]
    assert last == "supposed"
    assert not set(following) & {*learned, *pairs}


def test_where_guesses_are_right_what_follows_was_supposed(inhabited):
    """After the pairs, each combination was the first assumed one while its predecessor was traced."""
    techniques = [MadeUp("recompute", (4,), saves_fixed=40, seconds=(0.5,)), MadeUp("other", (4,), 40, (0.6,))]
    world, supposed = inhabited(World(techniques)), []

    def suppose(combinations):
        first = next((combination for combination, at_length in combinations if not at_length), None)
        supposed.append((len(world.asked), first))

    search(world.problem(230), world.evaluate, suppose=suppose)
    _, *following = supposed
    assert len(following) == 5
    assert [combination for _, combination in following] == [world.asked[num_asked + 1] for num_asked, _ in following]


def test_what_will_be_asked_for_at_full_length_is_supposed(inhabited):
    world, supposed = inhabited(World([MadeUp("recompute", (8,), seconds=(0.01,))], pass_seconds=1)), []
    found = search(
        world.problem(255),
        world.evaluate,
        at_length=world.evaluate,
        suppose=lambda combinations: supposed.extend(combinations),
    )
    assert (found.chosen.choices, True) in supposed


def test_fallbacks_are_what_was_traced_for_the_plan_and_one_combination_of_all_that_is_left(inhabited):
    techniques = [MadeUp("recompute", (4,), saves_fixed=40, seconds=(0.5,)), MadeUp("other", (4,), 40, (0.6,))]
    world = inhabited(World(techniques))
    found, _ = searched(world, 250)
    assert found.chosen.combination == ()
    leanest = found.fallbacks[-1]
    assert [choice.technique for choice in leanest.combination] == ["recompute", "other"]
    assert leanest.micro_batch == 1
    beside = [choices for choices in world.asked if len(choices) == 2]
    assert len(set(beside)) <= 2  # each once, for the plan


def test_the_update_sets_the_peak_and_only_what_reaches_it_is_chosen(inhabited):
    states = MadeUp("offload", (0,), saves_fixed=100, seconds=(0.1,), reaches=frozenset({"optimizer states"}))
    world = inhabited(World([MadeUp("recompute", (8,), seconds=(0.05,)), states]))
    found, _ = searched(world, 200)
    assert [choice.technique for choice in found.chosen.combination] == ["offload"]


def test_nothing_fits_and_the_least_is_said(inhabited):
    lossy = MadeUp("lossy", (5,), saves_fixed=150, seconds=(0.0,), numerics="lossy")
    world = inhabited(World([MadeUp("recompute", (8,), saves_fixed=20, seconds=(0.3,)), lossy]))
    found, _ = searched(world, 100)
    assert not found.fits
    assert found.chosen.need_bytes == 230  # the update: 50 + 200 - 20
    assert [evaluation.combination[-1].technique for evaluation in found.lossy_alternatives] == ["lossy"]
    found, _ = searched(world, 155, allow=["lossy"])
    assert found.fits
    assert "lossy" in [choice.technique for choice in found.chosen.combination]


def test_what_saves_more_on_top_of_another_than_alone_is_found_before_it_is_called_impossible(inhabited):
    """One sample needs 50 + 80 with both, which only a trace shows; the single effects suggest 50 + 101."""
    techniques = [MadeUp(name, (4,), saves_fixed=60, seconds=(0.1,)) for name in ("a", "b")]
    world = inhabited(World(techniques, clashes_bytes=-60))
    found, _ = searched(world, 140)
    assert found.fits
    assert [choice.technique for choice in found.chosen.combination] == ["a", "b"]


def test_a_lossy_alternative_leaves_out_what_conflicts_with_it(inhabited):
    lossy = MadeUp("lossy", (5,), saves_fixed=150, numerics="lossy", refuses=frozenset({"recompute"}))
    other = MadeUp("other", (1,), saves_fixed=10, seconds=(0.1,))
    world = inhabited(World([lossy, MadeUp("recompute", (8,), saves_fixed=20, seconds=(0.3,)), other]))
    found, _ = searched(world, 60)
    assert [choice.technique for choice in found.chosen.combination] == ["recompute", "other"]
    assert [[choice.technique for choice in evaluation.combination] for evaluation in found.lossy_alternatives] == [
        ["lossy", "other"]
    ]
    pinned = Choice(technique="recompute", options={"level": 0})
    found, _ = searched(world, 60, Decided((pinned,), frozenset(), frozenset()))
    assert found.lossy_alternatives == ()


def test_what_would_save_nothing_is_no_lossy_alternative(inhabited):
    found, _ = searched(inhabited(World([MadeUp("lossy", (9,), numerics="lossy")])), 60)
    assert (found.fits, found.lossy_alternatives) == (False, ())  # the update sets the peak


def test_pins_are_in_every_fallback_and_what_is_forbidden_in_none(inhabited):
    techniques = [MadeUp("recompute", (4, 8), seconds=(0.1, 0.3)), MadeUp("other", (9,), seconds=(0.01,))]
    world = inhabited(World(techniques))
    pinned = Choice(technique="recompute", options={"level": 1})
    found, _ = searched(world, 1000, Decided((pinned,), frozenset(), frozenset({"other"})))
    for evaluation in (found.chosen, *found.fallbacks):
        assert pinned in evaluation.combination
        assert "other" not in [choice.technique for choice in evaluation.combination]
    found, _ = searched(world, 1000, Decided((micro_batch_choice(4),), frozenset(), frozenset()))
    assert {evaluation.micro_batch for evaluation in (found.chosen, *found.fallbacks)} == {4}
    found, _ = searched(world, 1000, Decided((), frozenset({"recompute"}), frozenset()))
    assert found.chosen.combination == (Choice(technique="recompute", options={"level": 0}),)


def test_pins_that_exclude_each_other_are_refused(inhabited):
    world = inhabited(World([MadeUp("a", refuses=frozenset({"b"})), MadeUp("b")]))
    pinned = tuple(Choice(technique=name, options={"level": 0}) for name in "ab")
    with pytest.raises(InputError, match=r"a=0: not with b; leave out a --pin"):
        searched(world, 1000, Decided(pinned, frozenset(), frozenset()))


def test_a_technique_that_no_option_of_goes_with_the_other_pins_is_refused(inhabited):
    world = inhabited(World([MadeUp("a", (1, 2), seconds=(0.1, 0.2), refuses=frozenset({"b"})), MadeUp("b")]))
    pinned = Choice(technique="b", options={"level": 0})
    with pytest.raises(InputError, match=r"a=0: not with b; leave out a --pin"):
        searched(world, 1000, Decided((pinned,), frozenset({"a"}), frozenset()))


def test_fallbacks_fall_and_keep_what_is_for_the_run(inhabited):
    halves = MadeUp("half", (5,), seconds=(-0.4,), is_for_the_run=True, may_be_faster=True)
    world = inhabited(World([halves, MadeUp("recompute", (4,), saves_fixed=60, seconds=(0.3,))]))
    found, _ = searched(world, 260)
    needs = [evaluation.need_bytes for evaluation in (found.chosen, *found.fallbacks)]
    assert needs == sorted(set(needs), reverse=True)
    assert len(found.fallbacks) >= 1
    assert all(
        "half" in [choice.technique for choice in evaluation.combination]
        for evaluation in (found.chosen, *found.fallbacks)
    )


@pytest.mark.parametrize("seed", range(30))
def test_it_is_as_fast_as_the_best_of_all_combinations(inhabited, seed):
    """Effects add up; with odd seeds techniques also cost each other memory, which only a trace shows."""
    random = Random(seed)
    techniques = []
    for number in range(4):
        levels = random.randint(1, 2)
        techniques.append(
            MadeUp(
                f"t{number}",
                tuple(sorted(random.randint(0, 4) for _ in range(levels))),
                saves_fixed=random.choice([0, 0, 40, 80]),
                seconds=tuple(sorted(random.choice([0.02, 0.1, 0.3, 0.5]) for _ in range(levels))),
                reaches=frozenset({"activations", "optimizer states"}),
                refuses=frozenset({f"t{(number + 1) % 4}"}) if random.random() < 0.3 else frozenset(),
            )
        )
    if seed % 3 == 0:
        techniques.append(MadeUp("heap", (-4, -1, 2), seconds=(-0.3, -0.2, 0.2), may_be_faster=True, is_traced=False))
    world = inhabited(World(techniques, clashes_bytes=(seed % 2) * 10))
    for limit_bytes in (120, 180, 240, 300):
        world.asked.clear()
        found, problem = searched(world, limit_bytes)
        assert len({without_heap(choices) for choices in world.asked}) <= 30
        best = best_by_trying_all(world, problem)
        assert found.fits == (best is not None)
        if best is not None:
            assert found.chosen.need_bytes <= limit_bytes
            assert found.chosen.seconds <= 1.021 * best.seconds


def test_further_options_are_traced_of_what_may_be_in_the_plan_only(inhabited):
    """Two techniques would suffice, and the cheaper one is chosen. Its weaker option is cheaper still."""
    both = frozenset({"activations"})
    cheap = MadeUp("cheap", (8, 9), saves_fixed=90, seconds=(0.1, 0.2), reaches=both)
    dear = MadeUp("dear", (8, 9), saves_fixed=90, seconds=(0.9, 1.0), reaches=both)
    world = inhabited(World([cheap, dear]))
    found, problem = searched(world, 200)
    assert found.chosen.combination == (Choice(technique="cheap", options={"level": 0}),)
    assert found.chosen.seconds == best_by_trying_all(world, problem).seconds
    world.asked.clear()
    searched(world, 200)
    options = {str(choice) for choices in world.asked for choice in choices[1:]}
    assert options == {"cheap=0", "cheap=1", "dear=1"}


def test_where_nothing_fits_no_weaker_option_is_traced(inhabited):
    """A technique that affects no part of the peak is not combined with others either."""
    states = MadeUp("states", (0, 0), saves_fixed=90, seconds=(0.1, 0.2), reaches=frozenset({"optimizer states"}))
    useless = MadeUp("useless", (2,), reaches=frozenset({"temporaries"}))
    world = inhabited(World([useless, MadeUp("recompute", (4, 8), seconds=(0.2, 0.3)), states]))
    found, _ = searched(world, 100)
    assert not found.fits
    assert [str(choice) for choice in found.chosen.combination] == ["states=1"]
    assert not [choices for choices in world.asked if {"useless=0", "recompute=0", "states=0"} & {*map(str, choices)}]


def test_a_heap_is_counted_on_every_trace_and_takes_none(inhabited):
    """The fastest heap needs 16 bytes per sample: it fits with 8 samples, and with 16 only if other techniques help."""
    heap = MadeUp("heap", (-6, 2), seconds=(-0.4, 0.3), may_be_faster=True, is_traced=False)
    world = inhabited(World([MadeUp("recompute", (9,), saves_fixed=20, seconds=(0.3,)), heap]))
    found, problem = searched(world, 290)
    assert set(Counter(map(without_heap, world.asked[:-1])).values()) == {3}  # except the last resort
    assert found.chosen.combination == (Choice(technique="heap", options={"level": 0}),)
    assert found.chosen.micro_batch == 8
    assert found.chosen.seconds == best_by_trying_all(world, problem).seconds
    said = [one.choices[1:] for one in found.rejected if without_heap(one.choices) == (micro_batch_choice(8),)]
    assert [len(combination) for combination in said] == [
        0,
        1,
    ]  # the plan without a heap option, and with the other heap


def test_a_heap_that_is_pinned_is_the_only_one(inhabited):
    heap = MadeUp("heap", (-6, 2), seconds=(-0.4, 0.3), may_be_faster=True, is_traced=False)
    world = inhabited(World([MadeUp("recompute", (9,), saves_fixed=20, seconds=(0.3,)), heap]))
    pinned = Choice(technique="heap", options={"level": 1})
    found, _ = searched(world, 290, Decided((pinned,), frozenset(), frozenset()))
    assert found.chosen.combination == (pinned,)
    assert all(pinned in choices for choices in world.asked[1:])  # the first is the plain training
    found, _ = searched(world, 1000, Decided((), frozenset({"heap"}), frozenset()))
    assert found.chosen.combination == (Choice(technique="heap", options={"level": 0}),)


def test_the_same_problem_has_the_same_plan(inhabited):
    world = inhabited(World([MadeUp("a", (4,), seconds=(0.1,)), MadeUp("b", (4,), seconds=(0.1,))]))
    first, _ = searched(world, 155)
    second, _ = searched(world, 155)
    assert first == second


def test_a_need_that_is_guessed_below_nothing_does_not_stop_the_search(inhabited):
    techniques = [MadeUp("a", (12,), 95, (0.01,)), MadeUp("b", (9,), 180, (0.3,)), MadeUp("c", (12,), 95, (0.3,))]
    world = inhabited(World(techniques, clashes_bytes=-190))  # together they need much less than guessed
    found, _ = searched(world, 400)
    assert found.fits
    assert found.fallbacks


def test_what_does_not_hold_at_full_length_is_not_chosen(inhabited):
    """With `recompute` the whole batch fits in short evaluations only; 8 samples fit at any length."""
    world = inhabited(World([MadeUp("recompute", (8,), seconds=(0.01,))], pass_seconds=1))

    def at_length(choices):
        evaluation = world.evaluate(choices)
        more = evaluation.peak.model_copy(update={"high_bytes": evaluation.need_bytes + 20})
        return replace(evaluation, peak=more) if evaluation.micro_batch == BATCH_SIZE else evaluation

    short = search(world.problem(255), world.evaluate)
    assert short.chosen.micro_batch == BATCH_SIZE
    found = search(world.problem(255), world.evaluate, at_length=at_length)
    assert found.fits
    assert found.chosen.micro_batch < BATCH_SIZE
    assert at_length(found.chosen.choices).need_bytes <= 255


@pytest.mark.parametrize("name", ["evaluation", "optimizer_kernel"])
def test_what_acts_in_one_part_of_a_step_is_traced_where_that_part_may_be_too_much(inhabited, name):
    only_in = frozenset({"evaluation" if name == "evaluation" else "optimizer"})
    part = MadeUp(name, (0,), saves_fixed=40, reaches=frozenset({"optimizer states"}), only_in=only_in)
    update_is_peak = name == "optimizer_kernel"
    world = inhabited(World([part, MadeUp("recompute", (8,), saves_fixed=60, seconds=(0.1,))]))
    searched(world, 230)  # the update alone needs 250
    alone = [choices for choices in world.asked if [choice.technique for choice in choices[1:]] == [name]]
    assert bool(alone) == update_is_peak


def test_what_saves_less_of_an_update_than_can_be_told_is_not_traced(inhabited):
    only_in = frozenset({"optimizer"})
    kernel = MadeUp("optimizer_kernel", seconds=(-0.1,), reaches=frozenset(), may_be_faster=True, only_in=only_in)
    world = inhabited(World([kernel]))
    searched_with = {}
    for update_seconds in (0.01, 0.2):
        world.asked.clear()
        search(replace(world.problem(1000), update_seconds=update_seconds), world.evaluate)
        searched_with[update_seconds] = any(len(choices) > 1 for choices in world.asked)
    assert searched_with == {0.01: False, 0.2: True}
