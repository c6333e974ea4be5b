"""The plans that are about as fast as the chosen one, and the fallback order of a run."""

import pytest

from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.planning.search.near_best import MOST_CANDIDATES, can_follow, candidates_beside, in_falling_order
from plimsoll.records.plan import Choice, Configuration, Duration, micro_batch_choice
from plimsoll.records.prediction import Estimate

FUSED = Choice(technique="optimizer_kernel", options={"kernel": "fused"})
ON_DISK = Choice(technique="optimizer_offload", options={"to": "disk"})
CHUNKED = Choice(technique="chunked_loss", options={"chunk_tokens": 256})
RECOMPUTED = Choice(technique="checkpointing", options={"blocks": "all"})
KEPT = Choice(technique="heap", options={"mapped_from": "never"})
HALVED = Choice(technique="autocast", options={"dtype": "bf16"})
LIMIT_BYTES = 100


def evaluate(samples, *combination, need=90, seconds=1.0, fits=True, likely=None):
    """Return an evaluation with these bytes, and seconds with an uncertainty of a quarter."""
    peak = Estimate(likely_bytes=likely or need, low_bytes=likely or need, high_bytes=need)
    step_time = Duration(likely_seconds=seconds, low_seconds=seconds / 1.25, high_seconds=1.25 * seconds)
    return Evaluation((micro_batch_choice(samples), *combination), samples, peak, fits, step_time, {}, {})


def beside(chosen, *evaluations, fallbacks=()):
    return candidates_beside(chosen, fallbacks, (chosen, *evaluations), LIMIT_BYTES)


def test_candidates_are_those_that_fit_within_the_spread_of_the_fastest():
    near, far = evaluate(4, seconds=1.25), evaluate(2, seconds=1.26)
    too_large, failing = evaluate(16, need=101), evaluate(1, fits=False)
    assert beside(evaluate(8), near, far, too_large, failing) == (near,)


def test_what_probably_fits_is_a_candidate_since_a_trial_says_whether_it_does():
    kept = evaluate(8, KEPT, need=120, likely=100, seconds=0.9)
    assert beside(evaluate(8), kept, evaluate(4, KEPT, need=120, likely=101, seconds=0.8)) == (kept,)


def test_what_is_unlike_comes_before_what_is_nearly_alike_and_the_fastest_first():
    chosen = evaluate(8, CHUNKED)
    alike = [evaluate(8, FUSED, CHUNKED, seconds=1.01), evaluate(8, seconds=1.02), evaluate(8, FUSED, seconds=1.03)]
    others = [evaluate(4, seconds=1.2), evaluate(8, RECOMPUTED, seconds=1.1), evaluate(8, KEPT, seconds=1.15)]
    assert beside(chosen, *alike, *others) == (others[1], others[2], others[0])
    assert beside(chosen, *alike, others[0]) == (*alike[:2], others[0])
    assert len(beside(chosen, *alike, *others)) == MOST_CANDIDATES - 1


def test_of_what_is_alike_one_that_should_be_faster_than_the_plan_is_tried():
    """Among plans that cannot be told apart, the chosen plan has the fewest techniques."""
    faster = evaluate(8, FUSED, seconds=0.99)
    others = [evaluate(4, seconds=1.1), evaluate(2, seconds=1.15), evaluate(1, seconds=1.2)]
    assert beside(evaluate(8), *others, faster) == (faster, *others[:2])


def test_what_changes_the_training_is_the_same_in_all():
    assert beside(evaluate(8), evaluate(8, HALVED, seconds=0.9)) == ()


def test_a_candidate_can_go_down_to_a_fallback_of_the_plan():
    """Loading states back from disk takes memory, which is missing after an out-of-memory error."""
    fallback = evaluate(1, FUSED, need=40)
    assert beside(evaluate(8), evaluate(4, ON_DISK), fallbacks=(fallback,)) == ()
    assert len(beside(evaluate(8), evaluate(4, FUSED), fallbacks=(fallback,))) == 1
    assert beside(evaluate(8), evaluate(4, FUSED, need=39), fallbacks=(fallback,)) == ()
    assert len(beside(evaluate(8), evaluate(4, ON_DISK))) == 1


@pytest.mark.parametrize(
    ("before", "after", "is_possible"),
    [((), (FUSED,), True), ((FUSED,), (), False), ((FUSED,), (FUSED, ON_DISK), True), ((), (HALVED,), False)],
)
def test_what_has_moved_states_and_what_changes_the_training_stays(before, after, is_possible):
    assert can_follow(before, after) == is_possible


def configuration(samples, *combination, need):
    return evaluate(samples, *combination, need=need).configuration()


def test_the_fallbacks_of_a_plan_follow_another_as_far_as_they_can():
    fallbacks = (
        configuration(8, FUSED, need=80),
        configuration(4, FUSED, ON_DISK, need=60),
        configuration(1, FUSED, ON_DISK, need=40),
    )
    assert in_falling_order(configuration(8, need=90), fallbacks) == (configuration(8, need=90), *fallbacks)
    assert in_falling_order(configuration(4, FUSED, ON_DISK, need=70), fallbacks) == (
        configuration(4, FUSED, ON_DISK, need=70),
        fallbacks[2],
    )
    assert in_falling_order(configuration(8, FUSED, need=70), fallbacks) == (
        configuration(8, FUSED, need=70),
        *fallbacks[1:],
    )
    assert in_falling_order(configuration(8, ON_DISK, need=90), fallbacks) == (configuration(8, ON_DISK, need=90),)


def test_other_candidates_come_in_between_where_they_need_clearly_less():
    first, fallbacks = configuration(8, need=90), (configuration(4, FUSED, need=60),)
    assert in_falling_order(first, fallbacks, [configuration(4, KEPT, need=80)]) == (
        first,
        configuration(4, KEPT, need=80),
        *fallbacks,
    )
    assert in_falling_order(first, fallbacks, [configuration(4, KEPT, need=88)]) == (
        first,
        *fallbacks,
    )  # it would run out of memory, too
    assert in_falling_order(first, fallbacks, [configuration(4, ON_DISK, need=80)]) == (first, *fallbacks)
    assert in_falling_order(first, fallbacks, [configuration(2, FUSED, need=30)]) == (
        first,
        *fallbacks,
        configuration(2, FUSED, need=30),
    )
    assert in_falling_order(first, fallbacks, [configuration(8, CHUNKED, need=95)]) == (first, *fallbacks)


def test_passes_with_the_same_techniques_get_smaller():
    """A run moves from one to the next without changing its techniques."""
    assert in_falling_order(configuration(4, need=90), [configuration(8, need=80), configuration(2, need=50)]) == (
        configuration(4, need=90),
        configuration(2, need=50),
    )


def test_what_nothing_was_predicted_for_comes_last():
    single = Configuration(choices=(micro_batch_choice(1),))
    assert in_falling_order(configuration(8, need=90), [configuration(4, need=60), single]) == (
        configuration(8, need=90),
        configuration(4, need=60),
        single,
    )
