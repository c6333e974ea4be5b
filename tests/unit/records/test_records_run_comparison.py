"""The comparison of two runs, by hand."""

import evidence_records
import prediction_records
from plimsoll.records.run import RunRecord
from plimsoll.records.run_comparison import JobDifference, Place, RunComparison, RunSide


def run(**changes) -> RunRecord:
    """Return a run of three steps of 2, 1 and 3 s, with 10 units each."""
    steps = tuple(
        evidence_records.step_line(step, step_seconds=seconds, num_units=10, loss=4.0 - step, peak_bytes=step * 100)
        for step, seconds in ((1, 2.0), (2, 1.0), (3, 3.0))
    )
    return evidence_records.empty_run(**{"steps": steps} | changes)


def test_a_side_says_what_was_measured_without_the_first_step():
    side = RunSide.of(run())
    assert (side.step_seconds, side.units_per_second) == (2.0, 5.0)  # steps 2 and 3 took 4 s for 20 units
    assert (side.steps, side.losses, side.peaks_bytes) == ((1, 2, 3), (3.0, 2.0, 1.0), (100, 200, 300))
    assert (side.peak_bytes, side.choices) == (300, ("micro_batch=1",))
    assert (side.parts, side.predicted_peak_bytes) == ({}, None)


def test_a_step_that_was_repeated_counts_once():
    again = evidence_records.step_line(2, step_seconds=5.0, num_units=10, loss=9.0)
    side = RunSide.of(run(steps=(*run().steps[:2], again)))
    assert (side.losses, side.step_seconds) == ((3.0, 9.0), 5.0)


def test_a_run_of_which_nothing_happened_is_compared():
    side = RunSide.of(evidence_records.empty_run())
    assert (side.step_seconds, side.units_per_second, side.peak_bytes, side.losses) == (None, None, None, ())


def test_what_differs_in_the_jobs_is_named_by_field():
    first = run(job={"model": {"architecture": "gpt2", "n_layer": 2}, "steps": 3, "allow": []})
    second = run(job={"model": {"architecture": "gpt2", "n_layer": 4}, "steps": 3, "seed": 1, "allow": []})
    assert RunComparison.of(first, second).job == (
        JobDifference(field="model.n_layer", first=2, second=4),
        JobDifference(field="seed", first=None, second=1),
    )
    assert RunComparison.of(first, first).job == ()


def test_what_is_alive_at_the_peak_is_added_up_by_category_module_and_line():
    holding = prediction_records.holding(10, "activations", "mlp")
    plan = run().plan.model_copy(update={"prediction": prediction_records.fitting(largest=(holding, holding))})
    side = RunSide.of(run(plan=plan))
    place = Place(
        category="activations", module=holding.made.module, line=holding.made.line, num_bytes=2 * holding.num_bytes
    )
    assert side.places == (place,)
    assert side.parts == prediction_records.fitting().parts
