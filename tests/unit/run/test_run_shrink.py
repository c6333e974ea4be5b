"""The search: what is made, in what order, what is chosen, what is kept; the models are numbers here, see below.

`MadeUp` answers as the process does that makes models: each method leaves a share of the bytes and adds to the loss.
Real models are made in tests/end_to_end/test_shrink.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.errors import InputError, KilledError, OutputError
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Pin
from plimsoll.records.shrink import InferenceCost, Quality, ShrinkRecord, TrainingCost
from plimsoll.run import shrink as module
from plimsoll.run.shrink import ShrinkOptions, ShrinkSource, shrink
from plimsoll.run.shrink_process import Made, Offer
from plimsoll.run.shrink_recover import Trained

BYTES = 1000
EFFECTS = {"layers": (0.5, 0.4), "heads": (0.8, 0.1), "int8": (0.3, 0.01), "int4": (0.2, 0.5)}


class MadeUp:
    """Answers in place of the process; notes what it was asked to make."""

    made: list[str] = []
    teachers: list[Path | None] = []
    dies_at: str | None = None
    refuses: str | None = None

    def __init__(self, request):
        fields = json.loads(request.read_text())
        assert fields["record"] == "shrink-request"
        self.is_job = fields["job"] is not None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def offers(self):
        stages = {"int8": "values", "int4": "values"}
        known = [
            Offer(method=name, stage=stages.get(name, "structure"), saves="much", choices=(Choice(technique=name),))
            for name in EFFECTS
        ]
        return (*known, Offer(method="units", stage="structure", saves="more", reason="no recurrent layers"))

    def resolved(self, pins):
        return tuple(Choice(technique=pin.technique, options=pin.options) for pin in pins)

    def weight_bytes(self, chain):
        if {"int8", "int4"} <= {choice.technique for choice in chain}:
            return None
        size = BYTES
        for choice in chain:
            size = int(size * EFFECTS[choice.technique][0])
        return size

    def make(self, source, chain, target):
        name = " > ".join(map(str, chain)) or "original"
        if name == MadeUp.dies_at:
            raise KilledError("the process was killed: give the same command again", 9)
        if name == MadeUp.refuses:
            raise InputError(f"{name} cannot be judged: leave it out")
        MadeUp.made.append(name)
        (target / "config.json").write_text(json.dumps({"name": name}))
        size = self.weight_bytes(chain)
        loss = sum(EFFECTS[choice.technique][1] for choice in chain)
        if self.is_job:
            gain = Path(source.folder) / "gain.json"
            if gain.is_file():  # a model that was trained, here from 0.4
                loss, name = loss + 0.4 - json.loads(gain.read_text()), " > ".join(["run", *map(str, chain)])
            (target / "config.json").write_text(json.dumps({"name": name}))
            quality = Quality(loss=loss, num_samples=10)
        else:
            quality = Quality(loss=loss, num_samples=10, similarity=1 - loss)
        return Made(form="plain", file_bytes=size, weight_bytes=size, quality=quality, has_own_tokenizer=False)

    def measured(self, source):
        return InferenceCost(rows=1, longest_tokens=1, peak_bytes=2 * BYTES, baseline_bytes=BYTES, row_seconds=0.5)

    def predicted_training(self, source, teacher=None):
        MadeUp.teachers.append(teacher)
        return None


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ShrinkProcess", MadeUp)
    MadeUp.made, MadeUp.teachers, MadeUp.dies_at, MadeUp.refuses = [], [], None, None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "x.txt").write_text("a text\n")
    return ShrinkSource(tmp_path / "model", data=tmp_path / "x.txt")


def test_without_a_target_every_choice_is_made_alone_and_none_is_chosen(source, tmp_path):
    record = shrink(source, tmp_path / "out", ShrinkOptions())
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


def test_a_method_that_is_forbidden_is_not_used(source, tmp_path):
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250, forbids=("heads", "units")))
    assert record.models[record.best].name == "layers > int8"
    assert not record.unused
    with pytest.raises(InputError, match="--forbid int_4: there is no such method; did you mean `int4`"):
        shrink(source, tmp_path / "other", ShrinkOptions(forbids=("int_4",)))


def test_a_target_that_nothing_reaches_says_the_smallest_there_was(source, tmp_path):
    with pytest.raises(
        InputError,
        match="no chain of methods reaches 50 B: the smallest has about 80 B .layers > heads > int4.; give",
    ):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=50))


def test_a_chain_of_the_users_own_is_made_as_it_is(source, tmp_path):
    pins = (Pin(technique="heads"), Pin(technique="int4"))
    record = shrink(source, tmp_path / "out", ShrinkOptions(methods=pins))
    assert MadeUp.made == ["original", "heads > int4"]
    assert record.best == 1


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
    with pytest.raises(OutputError, match="begun with another model, data or options"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250, most_samples=3))
    (tmp_path / "x.txt").write_text("another text\n")
    with pytest.raises(OutputError, match="begun with another model, data or options"):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    MadeUp.dies_at = None
    assert shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250), force=True).target_bytes == 250


def test_another_target_goes_on_with_what_was_made(source, tmp_path):
    MadeUp.dies_at = "int8"
    with pytest.raises(KilledError):
        shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    MadeUp.made, MadeUp.dies_at = [], None
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=300, forbids=("int4",)))
    assert MadeUp.made[0] == "int8"
    assert record.models[record.best].name == "int8"


def test_what_cannot_be_made_is_said_and_the_others_are_tried(source, tmp_path):
    MadeUp.refuses = "heads"
    record = shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    assert ("heads", "heads cannot be judged: leave it out") in [(one.method, one.reason) for one in record.unused]
    assert record.models[record.best].name == "layers > int8"
    with pytest.raises(InputError, match="heads cannot be judged"):
        shrink(source, tmp_path / "own", ShrinkOptions(methods=(Pin(technique="heads"),)))


def test_a_place_that_holds_what_is_read_is_refused(source, tmp_path):
    for out in (tmp_path, tmp_path / "model", tmp_path / "x.txt"):
        with pytest.raises(OutputError, match="is read while a smaller model is made, and lies in --out"):
            shrink(source, out, ShrinkOptions(), force=True)
    assert (tmp_path / "model" / "config.json").is_file()


def test_where_nothing_was_made_nothing_is_left(source, tmp_path):
    MadeUp.dies_at = "original"
    with pytest.raises(KilledError):
        shrink(source, tmp_path / "out", ShrinkOptions())
    assert not (tmp_path / "out").exists()


def test_what_is_done_is_not_overwritten(source, tmp_path):
    shrink(source, tmp_path / "out", ShrinkOptions(target_bytes=250))
    with pytest.raises(OutputError, match="holds a model that is done: give another --out, or --force"):
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
    """A source with a job, whose data and trainings are made up too; returns it and what the training comes to."""
    gains = {"loss": 0.0}

    def train(job, begun, place, cache, num_steps, budget_bytes, teacher):
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
    options = ShrinkOptions(methods=(Pin(technique="layers"), Pin(technique="int8")), recover_steps=9)
    small = shrink(source, tmp_path / "out", options).models[1]
    assert source.folder in MadeUp.teachers  # what is predicted is the training that was done
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
    assert MadeUp.made == ["heads > int8", "heads", "int8"]  # one chain, and what is trained of it
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
    with pytest.raises(
        InputError, match=r"without heads, int8, int4 \(1 could not be made, the last layers: it cannot"
    ):
        shrink(source, tmp_path / "out", ShrinkOptions(recover_steps=9, target_bytes=600, forbids=forbids))


def test_a_training_that_does_harm_is_not(trained, tmp_path):
    source, gains = trained
    gains["loss"] = -3.0
    options = ShrinkOptions(methods=(Pin(technique="layers"),), recover_steps=9)
    small = shrink(source, tmp_path / "out", options).models[1]
    assert small.recovered.loss > small.quality.loss == small.best_quality.loss
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"name": "layers"}


def test_fewer_tokens_to_divide_among_are_no_better_language_model(trained, tmp_path, monkeypatch):
    source, _ = trained
    monkeypatch.setitem(EFFECTS, "vocabulary", (0.5, -0.3))
    record = shrink(source, tmp_path / "out", ShrinkOptions())
    losses = {model.name: model.quality.loss for model in record.models}
    assert losses["vocabulary"] == pytest.approx(losses["original"])
    options = ShrinkOptions(methods=(Pin(technique="vocabulary"), Pin(technique="layers")))
    small = shrink(source, tmp_path / "both", options).models[1]
    assert small.quality.loss == pytest.approx(losses["layers"])
