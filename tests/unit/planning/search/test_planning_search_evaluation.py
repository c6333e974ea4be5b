"""Evaluations of a trace: the peak of each phase, and its part that grows with the micro-batch."""

import pytest

from hand_traces import trace_of
from plimsoll.memory.predict import count_on_cpu
from plimsoll.planning.search.evaluation import Evaluation, PhasePeak, phase_peaks
from plimsoll.records.allocator import FAST_HEAP
from plimsoll.records.plan import Choice, Duration, micro_batch_choice, without_micro_batch
from plimsoll.records.prediction import Estimate

MIB = 1 << 20
NOTHING = Estimate(likely_bytes=0, low_bytes=0, high_bytes=0)
OFFLOAD = Choice(technique="optimizer_offload", options={"to": "disk"})


def counted(*ops):
    return count_on_cpu(trace_of(*ops), NOTHING, FAST_HEAP)


def test_each_phase_has_its_own_peak_with_what_grows_of_it():
    """Forward needs 10+3+6 at its second op, backward 10+6+5+2, and the update 10+5+20+1."""
    found = phase_peaks(
        counted(
            ("setup", 0, f"+w parameters {10 * MIB}"),
            ("copy", 1, f"+x inputs {3 * MIB}"),
            ("forward", 1, f"+a activations {6 * MIB}"),
            ("backward", 1, f"-x +t temporaries {2 * MIB} +g gradients {5 * MIB} -t -a"),
            ("optimizer", 1, f"+m optimizer_states {20 * MIB} +u temporaries {MIB} -u"),
        )
    )
    assert found == {
        "copy": PhasePeak(10 * MIB, 3 * MIB),
        "forward": PhasePeak(10 * MIB, 9 * MIB),
        "backward": PhasePeak(15 * MIB, 8 * MIB),
        "optimizer": PhasePeak(36 * MIB, 0),  # its temporaries are as large as the parameters, for any batch
    }


def test_what_was_before_the_first_step_is_no_peak():
    found = phase_peaks(
        counted(
            ("setup", 0, f"+w parameters {4 * MIB} +t temporaries {90 * MIB} -t"), ("forward", 1, "+a activations 1")
        )
    )
    assert found == {"forward": PhasePeak(4 * MIB, 1)}


def test_of_two_steps_the_one_that_needs_more_counts():
    found = phase_peaks(
        counted(
            ("forward", 1, f"+a activations {2 * MIB} -a"),
            ("optimizer", 1, f"+m optimizer_states {5 * MIB}"),
            ("forward", 2, f"+b activations {MIB}"),
        )
    )
    assert found["forward"] == PhasePeak(5 * MIB, MIB)


@pytest.fixture
def evaluation():
    choices = (micro_batch_choice(4), OFFLOAD)
    peak = Estimate(likely_bytes=100, low_bytes=90, high_bytes=120)
    return Evaluation(choices, 4, peak, True, Duration(likely_seconds=2.0, low_seconds=1.0, high_seconds=3.0), {}, {})


def test_an_evaluation_is_safe_in_the_top_of_its_range_and_takes_what_is_likely(evaluation):
    assert (evaluation.need_bytes, evaluation.seconds) == (120, 2.0)


def test_an_evaluation_is_a_configuration_and_its_combination_has_no_micro_batch(evaluation):
    assert evaluation.combination == without_micro_batch(evaluation.choices) == (OFFLOAD,)
    assert (
        evaluation.configuration().choices,
        evaluation.configuration().peak,
        evaluation.configuration().step_time,
    ) == (evaluation.choices, evaluation.peak, evaluation.step_time)
    assert evaluation.configuration().micro_batch == 4
