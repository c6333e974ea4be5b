"""The properties of a prediction."""

import pytest

from plimsoll.records.prediction import Prediction
from prediction_records import MIB, bare, estimate, fitting, moment, on_cpu, too_large


@pytest.mark.parametrize(
    ("low_mib", "likely_mib", "high_mib", "verdict"),
    [
        (90, 95, 100, "fits"),
        (90, 95, 101, "probably fits"),
        (90, 100, 110, "probably fits"),
        (100, 101, 110, "probably does not fit"),
        (101, 105, 110, "does not fit"),
    ],
)
def test_the_verdict_looks_at_the_range_and_the_answer_at_the_likely_value(low_mib, likely_mib, high_mib, verdict):
    peak = estimate(likely_mib).model_copy(update={"low_bytes": low_mib * MIB, "high_bytes": high_mib * MIB})
    prediction = fitting(limit_bytes=100 * MIB, peak=peak)
    assert (prediction.verdict, prediction.fits) == (verdict, verdict.endswith("fits"))


def test_what_finds_no_free_block_does_not_fit_even_below_the_limit():
    prediction = fitting(runs_out_at=moment())
    assert (prediction.fits, prediction.verdict) == (False, "probably does not fit")


@pytest.mark.parametrize("prediction", [fitting(), too_large(), bare(), on_cpu()])
def test_it_is_read_back_as_it_was_written(prediction):
    assert Prediction.from_json(prediction.to_json()) == prediction
