"""A comparison's derived numbers, and its conclusions about runs, by hand."""

from plimsoll.records.comparison import Comparison, Group, Learned, Side
from plimsoll.records.prediction import Moment

MOMENT = Moment(step=1, phase="forward", op="a", module="", line="")


def comparison_of(predicted_bytes: int, measured_bytes: int) -> Comparison:
    predicted, measured = (
        Side(peak_bytes=peak_bytes, parts={"activations": peak_bytes}, moment=MOMENT)
        for peak_bytes in (predicted_bytes, measured_bytes)
    )
    return Comparison(
        lowered_to="cpu", predicted=predicted, measured=measured, num_ops=1, num_differing_ops=0, first=None, groups=(),
        num_groups=0,
    )  # fmt: skip


def test_the_error_is_what_was_measured_beyond_the_prediction():
    assert (comparison_of(60, 80).error_bytes, comparison_of(60, 80).relative_error) == (20, 0.25)
    assert (comparison_of(80, 60).error_bytes, comparison_of(80, 80).is_equal) == (-20, True)
    assert comparison_of(8, 0).relative_error == 0.0


def test_a_group_differs_by_what_was_measured_beyond_it():
    group = Group(op="a", module="b", category="gradients", predicted_bytes=8, measured_bytes=2)
    assert group.difference_bytes == -6


def test_a_run_moves_the_mean_and_widens_the_range():
    learned = Learned(num_runs=1, mean=2.0, low=2.0, high=2.0).with_run(4.0).with_run(0.0)
    assert learned == Learned(num_runs=3, mean=2.0, low=0.0, high=4.0)
