"""Cached predictions and plans: they are reused only if nothing that they depend on has changed."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from plan_records import fitting_plan
from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.surroundings import _sources_of_others
from plimsoll.planning import cached_traces as module
from plimsoll.planning import plan, predict_job
from plimsoll.planning.cached_answers import plan_of, prediction_of
from plimsoll.records.comparison import Calibration
from plimsoll.records.job import Job
from plimsoll.records.plan import parse_pin
from prediction_records import fitting

pytestmark = pytest.mark.usefixtures("as_a_command")

SMALL = {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}


def job(**changes):
    fields = {"model": SMALL, "data": "nowhere.txt", "tokenizer": {"vocab_size": 1000}, "sequence_length": 32}
    return Job.from_fields(fields | changes)


@pytest.fixture
def made(monkeypatch):
    """Return the list of answers that were computed, with stubs for both kinds of answers."""
    asked = []

    def standing_in(answer):
        def make(of, **options):
            asked.append(of)
            return answer

        return make

    monkeypatch.setattr(predict_job, "predict_job", standing_in(fitting()))
    monkeypatch.setattr(plan, "plan_job", standing_in(fitting_plan()))
    monkeypatch.setattr("plimsoll.planning.cached_answers.baseline_for", lambda *_: nullcontext())
    monkeypatch.setattr("plimsoll.planning.cached_answers.load_model_code", lambda job: None)
    return asked


def is_known(of, **options):
    prediction, is_kept = prediction_of(of, **options)
    assert prediction == fitting()
    return is_kept


def test_a_real_prediction_is_the_same_again_and_is_not_made_again(monkeypatch):
    first, is_kept = prediction_of(job(), device="rtx3060")
    assert not is_kept
    monkeypatch.setattr(predict_job, "predict_job", None)
    assert prediction_of(job(), device="rtx3060") == (first, True)


def test_a_kept_prediction_is_found_without_torch():
    """A separate process finds the prediction that this process has cached."""
    first, _ = prediction_of(job(), device="rtx3060")
    lines = f"""
        import sys
        from plimsoll.cli.main import main
        from plimsoll.records.job import Job
        from plimsoll.planning.cached_answers import prediction_of
        found, is_kept = prediction_of(Job.from_json({job().to_json()!r}), device="rtx3060")
        assert is_kept and not {{"torch", "transformers"}} & set(sys.modules), is_kept
        print(found.to_json())
    """
    code = "\n".join(line.strip() for line in lines.splitlines())
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == json.loads(first.to_json())


def test_another_budget_shares_the_traces_of_a_plan():
    pinned = job(pin=["micro_batch=32"])
    first, _ = plan_of(pinned, device="rtx3060", limit_bytes=1 << 30)
    second, is_kept = plan_of(pinned, device="rtx3060", limit_bytes=1200 << 20)
    assert not is_kept
    assert first.num_traces > second.num_traces == 0
    assert second.choices == first.choices


def test_a_plan_is_another_answer_than_a_prediction(made):
    assert not is_known(job())
    assert plan_of(job()) == (fitting_plan(), False)
    assert plan_of(job()) == (fitting_plan(), True)
    assert is_known(job())
    assert len(made) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 33}, {"model": SMALL | {"hidden_size": 33}}, {"optimizer": {"lr": 0.5}}, {"ranks": 2},
        {"tokenizer": {"vocab_size": 1001}}, {"allow": ["lora"]}, {"precision": "bf16"}, {"budget": "2GiB"},
        {"data": {"train": "nowhere.txt", "pack": True}}, {"data": {"train": "nowhere.txt", "validation": 0.1}},
    ],
    ids=str,
)  # fmt: skip
def test_another_job_has_another_answer(made, changes):
    assert not is_known(job())
    assert not is_known(job(**changes))
    assert is_known(job(**changes))
    assert is_known(job())


def test_everything_that_is_asked_counts(made):
    questions = [
        {}, {"device": "rtx3060"}, {"device": "h100"}, {"limit_bytes": 1 << 30}, {"micro_batch": 4}, {"search": True},
        {"lengths": [3, 4]}, {"lengths": [3, 5]}, {"calibration": Calibration()}, {"pins": (parse_pin("heap=never"),)},
        {"forbids": ("heap",)},
    ]  # fmt: skip
    assert [is_known(job(), **options) for options in questions] == [False] * len(questions)
    assert [is_known(job(), **options) for options in questions] == [True] * len(questions)


def test_what_was_measured_of_the_machine_counts(made):
    folder = Path(os.environ["PLIMSOLL_CACHE"])
    assert not is_known(job())
    (folder / "speed-of-another.json").write_text("{}")
    assert not is_known(job())
    assert is_known(job())


def test_a_measurement_that_cannot_be_read_is_none(made):
    unreadable = Path(os.environ["PLIMSOLL_CACHE"], "speed-of-none.json")
    unreadable.mkdir()
    assert [is_known(job()) for _ in range(2)] == [False, True]
    unreadable.rmdir()


def test_an_answer_that_measured_the_machine_is_found_with_what_it_measured(monkeypatch):
    folder = Path(os.environ["PLIMSOLL_CACHE"])

    def measuring(of, **options):
        (folder / "exchange-2.json").write_text("{}")
        return fitting()

    monkeypatch.setattr(predict_job, "predict_job", measuring)
    assert [is_known(job()) for _ in range(2)] == [False, True]


def test_the_surroundings_count(made, monkeypatch):
    assert not is_known(job())
    monkeypatch.setattr(module, "surroundings", lambda: {"kernel": "another"})
    assert not is_known(job())


def test_a_technique_of_another_package_counts_by_its_source(made, monkeypatch, tmp_path):
    package = shutil.copytree(Path(__file__).parents[2] / "another_package", tmp_path / "another_package")
    monkeypatch.syspath_prepend(package)
    source = package / "plimsoll_rests.py"
    known = []
    for text in (source.read_text(), None, source.read_text() + "# another\n", None):
        if text is not None:
            source.write_text(text)
        _sources_of_others.cache_clear()  # as in another command
        known.append(is_known(job()))
    _sources_of_others.cache_clear()
    assert known == [False, True, False, True]


def test_texts_that_are_prepared_count_by_what_is_known_of_them(made):
    longer = TextSketch(1000, None, 0, longest=31)
    known = [plan_of(job(), texts=texts)[1] for texts in (None, longer, longer, longer._replace(longest=32))]
    assert known == [False, False, True, False]


def test_where_texts_are_does_not_count_and_how_large_their_vocabulary_is_does(made, tmp_path):
    """A tokenizer is trained on the texts, with 257 tokens and with some more."""
    folders = [tmp_path / name for name in "abc"]
    for folder, text in zip(folders, ("a a", "a a", "the cat sat on the mat, the cat sat"), strict=True):
        folder.mkdir()
        (folder / "text.txt").write_text(text)
    jobs = [job(data=str(folder / "text.txt"), tokenizer={"vocab_size": 300}) for folder in folders]
    assert [is_known(one) for one in jobs] == [False, True, False]


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    (path / "model.safetensors").write_bytes(bytes(100))
    return path


def test_a_folder_counts_by_what_is_in_it(made, folder):
    assert not is_known(job(model=str(folder)))
    moved = folder.rename(folder.with_name("moved"))
    assert not is_known(job(model=str(moved)))  # the answer contains the name of the folder
    for name in ("config.json", "model.safetensors"):
        stat, content = (moved / name).stat(), (moved / name).read_bytes()
        (moved / name).write_bytes(content[:-1] + b"!")
        os.utime(moved / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time
        assert not is_known(job(model=str(moved)))
    (moved / "adapter_config.json").touch()
    assert not is_known(job(model=str(moved)))
    (folder.parent / "elsewhere").mkdir()
    (moved / "inner").symlink_to(folder.parent / "elsewhere")
    (moved / "inner" / "itself").symlink_to(moved)
    assert is_known(job(model=str(moved)))
    (folder.parent / "elsewhere" / "weights").touch()
    assert not is_known(job(model=str(moved)))
    (moved / "adapter_config.json").rename(moved / "another.json")
    assert not is_known(job(model=str(moved)))
    assert is_known(job(model=str(moved)))


def test_a_trace_of_a_folder_is_found_wherever_that_is(folder):
    facts = module.facts_of(job(model=str(folder)), TextSketch(1000, None, 0), {})
    moved = folder.rename(folder.with_name("moved"))
    assert facts == module.facts_of(job(model=str(moved)), TextSketch(1000, None, 0), {})


def test_a_folder_that_is_called_as_a_value_is_none_of_the_job(made, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("lstm", "rnn", "fp32", "bf16"):
        Path(name).mkdir()
    assert not is_known(job())
    for changes in ({"model": SMALL | {"architecture": "rnn"}}, {"precision": "bf16"}):
        assert not is_known(job(**changes))
    (Path("lstm") / "run.json").touch()
    assert is_known(job())


def test_what_is_in_an_archive_counts_by_the_archive(made, tmp_path):
    archive = tmp_path / "vectors.zip"
    archive.write_bytes(b"one")
    of = job(embeddings=str(archive / "vectors.txt"))
    assert [is_known(of) for _ in range(2)] == [False, True]
    archive.write_bytes(b"two")
    assert not is_known(of)


@pytest.mark.parametrize("model", ["mine:build", "mine.models:Small.build", "my-models.build:make"])
def test_code_of_one_s_own_may_be_anything_and_is_looked_at_each_time(made, model):
    assert [is_known(job(model=model)) for _ in range(2)] == [False, False]


def test_vectors_from_an_address_are_looked_at_each_time(made):
    of = job(embeddings="https://localhost/vectors.txt")
    assert [is_known(of) for _ in range(2)] == [False, False]


def test_what_is_wrong_with_a_job_is_said_as_ever_and_not_kept(made, monkeypatch, tmp_path):
    wrong = job(tokenizer=str(tmp_path / "nothing"))
    assert [is_known(wrong) for _ in range(2)] == [False, False]  # the real one raises: no tokenizer


@pytest.mark.parametrize("content", [b"{}", b'{"record": "prediction", "schema": 1}', b"\xff"])
def test_an_entry_that_is_no_such_record_is_made_anew(made, monkeypatch, content):
    monkeypatch.setattr(module.cached_answers, "read", lambda kind, facts: content)
    assert not is_known(job())


def test_without_a_cache_all_is_made_each_time(made, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "file"))
    assert [is_known(job()) for _ in range(2)] == [False, False]


@pytest.mark.parametrize("device", [None, "local", "cuda", "cuda:0"])
def test_a_gpu_that_may_be_here_is_looked_at(made, monkeypatch, device):
    """The driver and the properties of the GPU are part of the key, unless torch cannot use the device."""
    monkeypatch.setattr(module, "may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known = [is_known(job(), device=device) for _ in range(2)]
    assert known == ([False, True] if device in {None, "local"} else [False, False])


def test_the_cache_may_be_removed_at_any_time(made):
    assert not is_known(job())
    shutil.rmtree(os.environ["PLIMSOLL_CACHE"])
    assert [is_known(job()) for _ in range(2)] == [False, True]
