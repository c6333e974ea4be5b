"""The text of a comparison of two runs."""

import pytest

from comparison_records import MIB, comparison, side
from plimsoll.records.run_comparison import JobDifference
from plimsoll.report import comparison_sheets


def rows(sheet):
    return {row[0]: row[1:] for row in sheet.rows}


def test_the_headline_says_what_changed():
    assert comparison_sheets.headline(comparison()) == (
        "second compared with first: peak -250.0 MiB (-50.0\u00a0%), step time +1.0 s (+50.0\u00a0%)."
    )
    bare = side(peak_bytes=None, step_seconds=None)
    assert comparison_sheets.headline(comparison(first=bare)) == (
        "second compared with first: no value was measured in both."
    )


def test_runs_of_one_name_are_told_apart():
    assert comparison_sheets.labels(comparison(second=side())) == ("first (first)", "first (second)")


def test_the_numbers_are_side_by_side():
    found = rows(comparison_sheets.number_sheet(comparison()))
    assert found["Peak memory"] == ("500.0 MiB", "250.0 MiB", "-250.0 MiB (-50.0\u00a0%)")
    assert found["Throughput"] == ("1,000 tokens/s", "750 tokens/s", "-250 tokens/s (-25.0\u00a0%)")
    assert found["Budget"] == ("1.0 GiB", "1.0 GiB", "same")
    assert found["Last loss"] == ("3.000", "2.500", "-0.5000 (-16.7\u00a0%)")
    assert found["Plan at end"] == ("micro_batch=8", "micro_batch=4", "differs")
    assert found["OOM events"] == ("0", "1", "+1")
    assert found["Validation loss"] == ("none", "none", "")


def test_tokens_are_not_compared_with_samples():
    found = rows(comparison_sheets.number_sheet(comparison(second=side(unit="samples"))))
    assert found["Throughput"] == ("1,000 tokens/s", "1,000 samples/s", "differs")


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_has_no_change(loss):
    found = rows(comparison_sheets.number_sheet(comparison(second=side(losses=(4.0, loss)))))
    assert found["Last loss"][2] == ""


def test_the_job_is_compared_in_words():
    sheet = comparison_sheets.job_sheet(comparison())
    assert sheet.rows == (("batch_size", "8", "4"),)
    budget = JobDifference(field="budget.device_bytes", first=MIB, second=None)
    assert comparison_sheets.job_sheet(comparison(job=(budget,))).rows == ((budget.field, "1.0 MiB", "not given"),)
    assert comparison_sheets.job_sentence(comparison(job=())) == "Both runs have the same job."
    assert "differ in 1 field," in comparison_sheets.job_sentence(comparison())


def test_categories_come_by_the_size_of_their_change():
    assert comparison_sheets.category_sheet(comparison()).rows == (
        ("activations", "300.0 MiB", "150.0 MiB", "-150.0 MiB (-50.0\u00a0%)"),
        ("parameters", "100.0 MiB", "100.0 MiB", "same"),
    )
    assert comparison_sheets.category_sheet(comparison(second=side(parts={}))).rows == ()


def test_what_only_one_lists_is_not_called_nothing():
    assert comparison_sheets.place_sheet(comparison()).rows == (
        ("activations", "mlp", "model.py:7", "200.0 MiB", "50.0 MiB", "-150.0 MiB (-75.0\u00a0%)"),
        ("gradients", "head", "unknown", "not listed", "10.0 MiB", ""),
    )
    assert comparison_sheets.place_sheet(comparison(second=side(places=()))).rows == ()


def test_of_many_places_the_largest_changes_are_shown():
    one = comparison().first.places[0]
    many = tuple(one.model_copy(update={"module": f"block.{i}", "num_bytes": (i + 1) * MIB}) for i in range(20))
    sheet = comparison_sheets.place_sheet(comparison(second=side(places=many)))
    assert len(sheet.rows) == 15
    assert sheet.title.endswith(", 15 of 21")
