"""The search: the models it makes, their order, the choice, and the files that are kept.

`MadeUp` replaces the process that makes models. Each method leaves a share of the bytes and adds to the loss.
tests/end_to_end/test_shrink.py makes real models.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from made_up_shrinks import BYTES, EFFECTS, MadeUp
from plimsoll.compression import search as module
from plimsoll.compression.recover import Trained
from plimsoll.compression.request import ShrinkOptions, ShrinkSource
from plimsoll.compression.search import RefusedError, shrink
from plimsoll.data.prepare import prepare
from plimsoll.errors import InputError, KilledError, OutputError
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import ShrinkRecord, TrainingCost
from shrink_records import trained_record
from small_runs import write_text


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ShrinkProcess", MadeUp)
    for name, value in {
        "made": [],
        "teachers": [],
        "trainings": [],
        "dies_at": None,
        "refuses": (),
        "no": None,
    }.items():
        monkeypatch.setattr(MadeUp, name, value)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "x.txt").write_text("a text\n")
    return ShrinkSource(tmp_path / "model", data=tmp_path / "x.txt")


def test_without_a_target_every_choice_is_made_alone_and_none_is_chosen(source, tmp_path):
    began = time.monotonic()
    record = shrink(source, tmp_path / "out", ShrinkOptions())
    assert 0 <= record.seconds <= time.monotonic() - began
    assert record.evaluated_on == f"the texts of {source.data}, 10 samples"
    assert record.saves == dict.fromkeys(EFFECTS, "much")
    assert MadeUp.made == ["original", "layers", "heads", "int8", "int4"]
    assert (record.best, len(record.models)) == (None, 5)
    assert [(one.method, one.reason) for one in record.unused] == [("units", "no recurrent layers")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shrink.json"]


def test_the_best_under_the_target_is_written(source, tmp_path):
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    assert record.models[record.best].name == "heads > int8"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "heads > int8"}
    assert ShrinkRecord.load(tmp_path / "out" / "shrink.json") == record
    reasons = {model.name: model.rejected for model in record.models}
    assert reasons["heads"] == "550 B over the target"
    assert reasons["heads > int8"] == reasons["int4"] == ""


def test_of_the_chains_that_fit_as_many_are_made_as_asked_for(source, tmp_path):
    shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250, most_tries=1))
    assert MadeUp.made[5:] == ["heads > int8"]


def test_four_chains_are_made_where_no_number_of_them_is_given(source, tmp_path, monkeypatch):
    for number, name in enumerate(["units", "tied", "hidden", "channels", "vocabulary", "low_rank"]):
        monkeypatch.setitem(EFFECTS, name, (0.24, number / 10))
    shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=100))
    assert len(MadeUp.made[11:]) == 4


@pytest.mark.parametrize(
    ("header_bytes", "target_bytes", "name"),
    [(0, 240, "heads > int8"), (0, 239, "layers > int8"), (24, 264, "heads > int8"), (24, 263, "layers > int8")],
)
def test_a_chain_is_made_where_its_files_are_no_larger_than_the_target(
    source, tmp_path, monkeypatch, header_bytes, target_bytes, name
):
    monkeypatch.setattr(MadeUp, "header_bytes", header_bytes)
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=target_bytes, most_tries=1))
    assert MadeUp.made[5:] == [name]
    assert record.models[record.best].name == name


def test_where_no_guess_is_small_enough_all_methods_together_are_made(source, tmp_path, monkeypatch):
    def weight_bytes(self, chain, before=MadeUp.weight_bytes):
        found = before(self, chain)  # three methods together remove more than the product of their shares
        return found // 2 if found is not None and len(chain) == 3 else found

    monkeypatch.setattr(MadeUp, "weight_bytes", weight_bytes)
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=60))
    assert MadeUp.made[5:] == ["layers > heads > int4"]
    assert record.models[record.best].name == "layers > heads > int4"


def test_what_a_method_costs_is_counted_from_the_originals_loss(source, tmp_path, monkeypatch):
    monkeypatch.setattr(MadeUp, "original_loss", 0.2)
    monkeypatch.setitem(EFFECTS, "tied", (0.24, 0.15))  # alone worse than heads and int8 together
    shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250, most_tries=1))
    assert MadeUp.made[6:] == ["heads > int8"]


def test_each_model_is_counted_while_it_is_made(source, tmp_path):
    told = []
    options = ShrinkOptions(target_bytes=250, most_tries=2)
    shrink(source, tmp_path / "out", options, progress=lambda *one: told.append(one))
    assert told == [*(("methods alone", done, 4) for done in range(5)), *(("chains", done, 2) for done in range(3))]


def test_the_smallest_that_was_made_is_said_where_no_size_can_be_looked_at(source, tmp_path, monkeypatch):
    def weight_bytes(self, chain, before=MadeUp.weight_bytes):
        return before(self, chain) if len(chain) < 2 else None

    monkeypatch.setattr(MadeUp, "weight_bytes", weight_bytes)
    forbids = ("heads", "int8", "int4")
    with pytest.raises(InputError, match=r"without heads, int8, int4 reaches 400 B: the smallest has about 500 B"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=400, forbids=forbids))


def test_of_what_could_not_be_made_the_number_and_the_last_reason_are_said(source, tmp_path):
    MadeUp.refuses = ("layers", "heads", "int8")
    with pytest.raises(InputError, match=r"\(3 failed, the last one int8: int8 cannot be judged"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=70))


def test_a_method_that_is_forbidden_is_not_used(source, tmp_path):
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250, forbids=("heads", "units")))
    assert record.models[record.best].name == "layers > int8"
    assert not record.unused
    with pytest.raises(InputError, match="--forbid int_4: there is no such method; did you mean `int4`"):
        shrink(source, tmp_path / "other", ShrinkOptions(forbids=("int_4",)))


@pytest.mark.parametrize(("target_bytes", "is_tried"), [(70, True), (50, False), (1, False)])
def test_a_target_that_nothing_reaches_is_refused_with_the_smallest_and_one_far_below_at_once(
    source, tmp_path, target_bytes, is_tried
):
    with pytest.raises(
        InputError,
        match=f"no chain of methods reaches {target_bytes} B: the smallest has about 80 B .layers > heads > int4.",
    ):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=target_bytes))
    assert bool(MadeUp.made) == is_tried
    assert (tmp_path / "out").exists() == is_tried


def test_a_chain_of_the_users_own_is_made_as_it_is(source, tmp_path):
    pins = (Choice(technique="heads"), Choice(technique="int4"))
    record = shrink(source, tmp_path / "out", ShrinkOptions(methods=pins))
    assert MadeUp.made == ["original", "heads > int4"]
    assert (record.best, record.unused, record.saves) == (1, (), {"heads": "much", "int4": "much"})


def test_what_was_made_before_a_death_is_not_made_again(source, tmp_path):
    MadeUp.dies_at = "int8"
    with pytest.raises(KilledError, match="give the same command again"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    before, MadeUp.made, MadeUp.dies_at = MadeUp.made, [], None
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    assert before == ["original", "layers", "heads"]
    assert MadeUp.made[:2] == ["int8", "int4"]
    assert record.models[record.best].name == "heads > int8"


def test_what_was_begun_otherwise_is_not_gone_on_with(source, tmp_path):
    MadeUp.dies_at = "int8"
    with pytest.raises(KilledError):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    with pytest.raises(OutputError, match="started with another model, data or options"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250, most_samples=3))
    (tmp_path / "x.txt").write_text("another text\n")
    with pytest.raises(OutputError, match="started with another model, data or options"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    MadeUp.dies_at = None
    assert shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250), force=True).target_bytes == 250


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        ({}, {"budget_bytes": 9, "distills": False}, True),  # these concern the training, and there is no training
        ({"recover_steps": 9}, {"recover_steps": 8}, False),
        ({"recover_steps": 9}, {"recover_steps": 9, "distills": False}, False),
        ({"recover_steps": 9}, {"recover_steps": 9, "budget_bytes": 9}, False),
        ({"recover_steps": 9}, {"recover_steps": 9, "most_tries": 2}, True),
    ],
)
def test_options_that_change_a_model_begin_anew_and_others_go_on(source, tmp_path, before, after, goes_on):
    shrink(source, tmp_path / "out", ShrinkOptions(**before), keep_all=True)
    MadeUp.made = []
    if goes_on:
        shrink(source, tmp_path / "out", ShrinkOptions(**after))
    else:
        with pytest.raises(OutputError, match="started with another model, data or options"):
            shrink(source, tmp_path / "out", ShrinkOptions(**after))
    assert MadeUp.made == []


def test_another_target_goes_on_with_what_was_made(source, tmp_path):
    MadeUp.dies_at = "int8"
    with pytest.raises(KilledError):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    MadeUp.made, MadeUp.dies_at = [], None
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=300, forbids=("int4",)))
    assert MadeUp.made[0] == "int8"
    assert record.models[record.best].name == "int8"


def test_what_cannot_be_made_is_said_and_the_others_are_tried(source, tmp_path):
    MadeUp.refuses = ("heads",)
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    assert ("heads", "heads cannot be judged: leave it out") in [(one.method, one.reason) for one in record.unused]
    assert record.models[record.best].name == "layers > int8"
    with pytest.raises(InputError, match="heads cannot be judged"):
        shrink(source, tmp_path / "own", ShrinkOptions(methods=(Choice(technique="heads"),)))


def test_a_place_that_holds_what_is_read_is_refused(source, tmp_path):
    for out in (tmp_path, tmp_path / "model", tmp_path / "x.txt"):
        with pytest.raises(OutputError, match="is an input and lies in --out"):
            shrink(source, out, ShrinkOptions(), force=True)
    assert (tmp_path / "model" / "config.json").is_file()


def test_where_nothing_was_made_nothing_is_left(source, tmp_path):
    MadeUp.dies_at = "original"
    with pytest.raises(KilledError):
        shrink(source, tmp_path / "out", ShrinkOptions())
    assert not (tmp_path / "out").exists()


def test_what_is_done_is_not_overwritten(source, tmp_path):
    shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    with pytest.raises(OutputError, match="holds a finished model: give another --out, or --force"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(OutputError, match="give another --out"):
            shrink(source, tmp_path / "mine", ShrinkOptions(target_bytes=250), force=force)


def test_all_models_stay_where_that_is_asked_for(source, tmp_path):
    shrink(source, tmp_path / "out", ShrinkOptions(), keep_all=True)
    assert len(list((tmp_path / "out" / ".shrink" / "models").glob("*/model/config.json"))) == 5


@pytest.fixture
def trained(source, monkeypatch):
    """Return a source with a job whose trainings are simulated, and the values that each training gains."""
    gains = {"loss": 0.0}

    def train(job, begun, place, cache, num_steps, budget_bytes, teacher):
        MadeUp.trainings.append((num_steps, teacher))
        (place / "run").mkdir(exist_ok=True)
        (place / "run" / "gain.json").write_text(json.dumps(gains["loss"]))
        return Trained(place / "run", TrainingCost(peak_bytes=5 * BYTES, step_seconds=0.5))

    monkeypatch.setattr(module, "_prepare", lambda *arguments: None)
    monkeypatch.setattr(module, "train_again", train)
    job = Job.from_fields({"model": str(source.folder), "data": {"train": "x.txt", "validation": 0.5}})
    return ShrinkSource(source.folder, job), gains


def test_a_training_that_helps_is_what_is_written(trained, tmp_path):
    source, gains = trained
    gains["loss"] = 0.2
    options = ShrinkOptions(methods=(Choice(technique="layers"), Choice(technique="int8")), recover_steps=9)
    original, small = shrink(source, tmp_path / "out", options).models
    # The original is trained for as many steps, from the labels alone, for a fair comparison.
    assert MadeUp.trainings == [(9, None), (9, source.folder)]
    assert (original.training.peak_bytes, original.recovery_steps) == (5 * BYTES, 9)
    assert original.recovered.loss == pytest.approx(0.2)
    assert source.folder in MadeUp.teachers  # the prediction is of the training that was done
    assert small.quality.loss == pytest.approx(0.41)
    assert small.recovered.loss == pytest.approx(0.21)
    assert (small.recovery_steps, small.training.peak_bytes) == (9, 5 * BYTES)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "run > int8"}


def test_a_target_behind_a_survey_makes_nothing_of_it_again(trained, tmp_path):
    source, gains = trained
    gains["loss"] = 0.05
    surveyed = shrink(source, tmp_path / "out", ShrinkOptions(recover_steps=9), keep_all=True)
    MadeUp.made = []
    record = shrink(source, tmp_path / "out", ShrinkOptions(recover_steps=9, target_bytes=250, most_tries=1))
    found = {one.name: one.model_copy(update={"rejected": ""}) for one in record.models}
    assert all(found[one.name] == one for one in surveyed.models)
    assert found["layers"].recovered is not None
    assert MadeUp.made == ["heads > int8", "heads", "int8"]  # one chain, and the models that are trained from it
    assert record.models[record.best].name == "heads > int8"


def test_what_cannot_be_applied_behind_its_training_is_not_taken_for_what_it_was_before(trained, tmp_path, monkeypatch):
    source, gains = trained
    gains["loss"] = 0.05

    def measured(self, given, before=MadeUp.measured):
        if json.loads((Path(given.folder) / "config.json").read_text())["name"] == "run":
            raise InputError("it cannot be applied")
        return before(self, given)

    monkeypatch.setattr(MadeUp, "measured", measured)
    forbids = ("heads", "int8", "int4")
    with pytest.raises(InputError, match=r"without heads, int8, int4 \(1 failed, the last one layers: it cannot"):
        shrink(source, tmp_path / "out", ShrinkOptions(recover_steps=9, target_bytes=600, forbids=forbids))


@pytest.mark.parametrize("distills", [False, True], ids=["alone", "with the answers of the original"])
def test_a_training_follows_the_original_where_that_is_asked_for(trained, tmp_path, distills):
    source, _ = trained
    options = ShrinkOptions(methods=(Choice(technique="layers"),), recover_steps=9, distills=distills)
    shrink(source, tmp_path / "out", options)
    assert MadeUp.trainings[1:] == [(9, source.folder if distills else None)]


def test_only_what_changes_shapes_is_trained_and_of_a_search_only_chains(trained, tmp_path):
    source, _ = trained
    record = shrink(source, tmp_path / "out", ShrinkOptions(recover_steps=9, target_bytes=250, most_tries=2))
    steps = {model.name: model.recovery_steps for model in record.models}
    alone = dict.fromkeys(["layers", "heads", "int8", "int4"], 0)
    assert steps == alone | {"original": 9, "heads > int8": 9, "layers > int8": 9}
    own = ShrinkOptions(methods=(Choice(technique="int8"),), recover_steps=9)
    assert shrink(source, tmp_path / "own", own).models[1].recovered is None


def test_without_steps_nothing_is_trained_and_what_can_be_is_predicted(trained, tmp_path):
    source, _ = trained
    record = shrink(source, tmp_path / "out", ShrinkOptions())
    assert MadeUp.trainings == []
    is_predicted = {model.name: model.training is not None for model in record.models}
    assert is_predicted == {"original": True, "layers": True, "heads": True, "int8": False, "int4": False}
    assert all((model.recovered, model.recovery_steps) == (None, 0) for model in record.models)


@pytest.mark.parametrize("distill", [None, {"teacher": "t"}])
def test_what_the_original_took_is_read_of_its_run(trained, tmp_path, distill):
    trained_record(9.0, 2.5, 3.0, peak_bytes=7 * BYTES, job={"distill": distill}).save(tmp_path / "run.json")
    source = replace(trained[0], trained=tmp_path / "run.json")
    original = shrink(source, tmp_path / "out", ShrinkOptions(recover_steps=9)).models[0]
    assert [steps for steps, _ in MadeUp.trainings] == [9, 9, 9]  # for the original, layers and heads
    assert (original.training.peak_bytes, original.training.step_seconds) == (7 * BYTES, 2.75)
    assert original.training.has_teacher == bool(distill)


@pytest.mark.parametrize("gain", [-3.0, 0.0])
def test_a_training_that_does_harm_or_nothing_is_not(trained, tmp_path, gain):
    source, gains = trained
    gains["loss"] = gain
    options = ShrinkOptions(methods=(Choice(technique="layers"),), recover_steps=9)
    small = shrink(source, tmp_path / "out", options).models[1]
    assert small.recovered.loss == pytest.approx(0.4 - gain)
    assert small.quality.loss == small.best_quality.loss == 0.4
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "layers"}


def test_fewer_tokens_to_divide_among_are_no_better_language_model(trained, tmp_path, monkeypatch):
    source, _ = trained
    monkeypatch.setitem(EFFECTS, "vocabulary", (0.5, -0.3))
    record = shrink(source, tmp_path / "out", ShrinkOptions())
    losses = {model.name: model.quality.loss for model in record.models}
    assert losses["vocabulary"] == pytest.approx(losses["original"])
    options = ShrinkOptions(methods=(Choice(technique="vocabulary"), Choice(technique="layers")))
    small = shrink(source, tmp_path / "both", options).models[1]
    assert small.quality.loss == pytest.approx(losses["layers"])
    options = replace(options, recover_steps=9)
    shrink(source, tmp_path / "with-teacher", options, keep_all=True)
    _, (_, teacher) = MadeUp.trainings
    # the teacher reads the same tokens
    assert json.loads((teacher / "config.json").read_text()) == {"name": "vocabulary"}


def test_embeddings_of_fewer_tokens_are_as_near_as_they_are(source, tmp_path, monkeypatch):
    monkeypatch.setitem(EFFECTS, "vocabulary", (0.5, 0.3))
    small = shrink(source, tmp_path / "out", ShrinkOptions(methods=(Choice(technique="vocabulary"),))).models[1]
    assert (small.quality.loss, small.quality.similarity) == (0.3, 0.7)


def test_data_that_cannot_be_prepared_are_refused_with_the_code_of_what_refused_them(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "prepare_data", lambda directory, cache, quiet: 3)
    job = Job.from_fields({"model": str(source.folder), "data": {"train": "none.txt", "validation": 0.5}})
    with pytest.raises(RefusedError) as raised:
        shrink(ShrinkSource(source.folder, job), tmp_path / "out", ShrinkOptions())
    assert raised.value.exit_code == 3
    assert MadeUp.made == []


def test_models_judged_by_other_texts_are_not_gone_on_with(source, tmp_path, monkeypatch):
    def prepare_here(directory, cache, quiet):  # replaces a separate process
        prepare(Job.from_yaml(directory.job), cache).save(directory.prepared)
        return 0

    monkeypatch.setattr(module, "prepare_data", prepare_here)
    fields = {"tokenizer": {"vocab_size": 300}, "sequence_length": 8}
    data = {"train": str(write_text(tmp_path / "ship.txt")), "validation": 0.5}
    job = Job.from_fields({"model": str(source.folder), "data": data} | fields)
    given = ShrinkSource(source.folder, job)
    shrink(given, tmp_path / "out", ShrinkOptions(), keep_all=True)
    MadeUp.made = []
    shrink(given, tmp_path / "out", ShrinkOptions(), keep_all=True)
    assert MadeUp.made == []
    (tmp_path / "ship.txt").write_text("other words\n" * 900)
    with pytest.raises(OutputError, match="have changed since .* was started: give --force"):
        shrink(given, tmp_path / "out", ShrinkOptions())


def test_what_the_model_refuses_is_refused_before_the_data_are_read_and_leaves_nothing(trained, tmp_path, monkeypatch):
    source, _ = trained
    MadeUp.no = "layers cannot keep 99 of 6: give keep from 1 to 5"
    monkeypatch.setattr(module, "_prepare", lambda *arguments: pytest.fail("it is too early for the data"))
    with pytest.raises(InputError, match="layers cannot keep 99 of 6"):
        shrink(source, tmp_path / "out", ShrinkOptions(methods=(Choice(technique="layers", options={"keep": 99}),)))
    assert not (tmp_path / "out").exists()


def test_what_was_found_is_kept_and_said_model_by_model(source, tmp_path):
    said = []
    MadeUp.dies_at = "int8"
    with pytest.raises(KilledError):
        shrink(source, tmp_path / "out", ShrinkOptions(), say=said.append)
    assert said[1:] == [
        "original: 1000 B (100%), similarity 1.0000",
        "1 of 4, layers: 500 B (50%), similarity 0.6000",
        "2 of 4, heads: 800 B (80%), similarity 0.9000",
    ]
    found = ShrinkRecord.load(tmp_path / "out" / ".shrink" / "shrink.json")
    assert ([one.name for one in found.models], found.is_complete) == (["original", "layers", "heads"], False)


def test_the_original_is_once_as_fast_as_itself(source, tmp_path, monkeypatch):
    def measured(self, given, before=MadeUp.measured):
        return before(self, given).model_copy(update={"speed": 1.1})  # as if two timings of one model differed

    monkeypatch.setattr(MadeUp, "measured", measured)
    record = shrink(source, tmp_path / "out", ShrinkOptions())
    assert [one.inference.speed for one in record.models] == [1.0, 1.1, 1.1, 1.1, 1.1]


def test_an_original_that_cannot_be_trained_as_long_is_said(trained, tmp_path, monkeypatch):
    source, _ = trained

    def train(job, begun, place, cache, num_steps, budget_bytes, teacher, before=module.train_again):
        if teacher is None:
            raise InputError("the budget is too small for it")
        return before(job, begun, place, cache, num_steps, budget_bytes, teacher)

    monkeypatch.setattr(module, "train_again", train)
    options = ShrinkOptions(methods=(Choice(technique="layers"),), recover_steps=9)
    record = shrink(source, tmp_path / "out", options)
    assert record.original.recovered is None
    assert [(one.method, one.reason) for one in record.unused] == [
        ("the original, trained as long", "the budget is too small for it")
    ]


def test_a_peak_of_training_is_predicted_where_a_training_was_asked_for(trained, tmp_path):
    source, _ = trained
    folder = replace(source, is_to_train=False)
    assert all(one.training is None for one in shrink(folder, tmp_path / "out", ShrinkOptions()).models)
    record = shrink(folder, tmp_path / "again", ShrinkOptions(recover_steps=9))
    assert [one.name for one in record.models if one.training is not None] == ["original", "layers", "heads"]
