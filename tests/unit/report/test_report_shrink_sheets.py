"""The text about smaller models: the chosen model, the size and quality of each, and why the others were rejected."""

from __future__ import annotations

from plimsoll.report.render import render
from plimsoll.report.shrink_sheets import front_points, headline, measure_name, shrink_sheets
from shrink_records import language_model, shrunk, survey


def test_the_sentence_says_what_was_saved_and_what_it_cost():
    assert headline(shrunk()) == (
        "layers=2 > int8: 16.0 MiB -> 3.0 MiB (19%), accuracy 90.0% -> 88.0% after 100 more steps (the original was "
        "not trained further and might improve too); written to small."
    )
    original, *others = shrunk().models
    trained = original.model_copy(update={"recovered": others[0].quality, "recovery_steps": 100})
    assert "accuracy 90.0% -> 88.0%, both after 100 more steps" in headline(shrunk(models=(trained, *others)))
    assert headline(shrunk(is_complete=False)).startswith("Stopped after 3 smaller versions of runs/a/model")
    assert headline(survey()).startswith("3 smaller versions of runs/a/model, each measured on 10% of")


def test_a_choice_that_is_slow_on_this_machine_is_said_to_be_so():
    record = shrunk()
    best = record.models[record.best]
    cost = best.inference or record.models[1].inference
    slow = best.model_copy(update={"inference": cost.model_copy(update={"speed": 0.125})})
    models = tuple(slow if number == record.best else one for number, one in enumerate(record.models))
    said = headline(record.model_copy(update={"models": models}))
    assert said.startswith(headline(record))
    assert said.endswith("it takes 8.0 times as long as the original: give --forbid to leave out a slow method.")


def test_models_are_listed_by_quality_behind_the_original():
    sheet = shrink_sheets(shrunk())[0]
    assert sheet.rows == (
        ("original", "16.0 MiB", "100%", "90.0%", "-", "12.0 MiB over the target"),
        ("int8", "5.0 MiB", "31%", "89.5%", "-", "1.0 MiB over the target"),
        ("* layers=2 > int8", "3.0 MiB", "19%", "79.5%", "88.0%", "-"),
        ("layers=2", "8.0 MiB", "50%", "80.0%", "-", "4.0 MiB over the target"),
    )
    assert sheet.title == "Quality on 10% of the training data, target 4.0 MiB"


def test_what_a_process_takes_is_told_from_what_it_takes_without_a_model():
    rows = {row[0]: row[1:] for row in shrink_sheets(shrunk())[1].rows}
    assert rows["original"] == ("260.0 MiB", "60.0 MiB", "270.0 MiB", "500", "x 1.00")
    assert rows["int8"] == ("250.0 MiB", "50.0 MiB", "260.0 MiB", "250", "x 0.50")


def test_training_is_shown_of_what_can_be_trained():
    rows = shrink_sheets(shrunk())[2].rows
    assert rows == (
        ("original", "700.0 MiB", "690.0 MiB", "-", "none"),
        ("* layers=2 > int8", "500.0 MiB", "480.0 MiB", "250 ms", "included"),
    )


def test_without_a_target_the_best_of_each_size_are_marked():
    rows = {row[0]: row[-1] for row in shrink_sheets(survey())[0].rows}
    assert rows == {"original": "yes", "int8": "yes", "layers=2 > int8": "yes", "layers=2": "-"}


def test_a_language_model_is_judged_by_its_perplexity():
    assert shrink_sheets(language_model())[0].rows[0][3] == "1.0"
    assert measure_name(language_model()) == "perplexity"
    assert measure_name(shrunk()) == "accuracy, %"


def test_points_are_those_after_training():
    assert front_points(shrunk())[3] == (3 << 20, 88.0, "layers=2 > int8", True)


def test_how_it_is_loaded_without_plimsoll_is_said():
    assert "Use without Plimsoll" in render(shrunk())
    assert "torchao" in render(shrunk())
    assert "Use without Plimsoll" not in render(survey())
