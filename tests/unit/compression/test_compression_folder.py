"""The output folder of a smaller model: its owner, and the files that are removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.compression.folder import SHRINK_RECORD, drop_if_empty, found_until_now, opened, refuse_overlap, take
from plimsoll.errors import OutputError


def test_the_same_command_goes_on_and_another_one_does_not(tmp_path):
    work = opened(tmp_path / "out", {"target": 1}, force=False)
    (work / "made").write_text("much")
    assert (opened(tmp_path / "out", {"target": 1}, force=False) / "made").is_file()
    with pytest.raises(OutputError, match="started with another model, data or options.*--force to start again"):
        opened(tmp_path / "out", {"target": 2}, force=False)
    assert not (opened(tmp_path / "out", {"target": 2}, force=True) / "made").exists()


def test_what_was_not_made_here_is_never_removed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(OutputError, match="give another --out"):
            opened(tmp_path, {}, force)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("is_done", [True, False])
def test_of_a_model_that_was_made_here_all_is_removed_and_nothing_else(tmp_path, is_done):
    out = tmp_path / "out"
    work = opened(out, {"target": 1}, force=False)
    made = {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    for name in (*made, "notes.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("text")
    if is_done:
        (out / SHRINK_RECORD).write_text("{}")
    opened(out, {"target": 2}, force=True)
    left = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    asked = (work / "asked.json").relative_to(out).as_posix()
    assert left == {"notes.txt", asked} | (set() if is_done else made)


def test_nothing_was_found_where_nothing_was_measured(tmp_path):
    assert found_until_now(tmp_path) is None


def test_a_file_or_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file, but a model needs a folder"):
        opened(tmp_path / "file", {}, force=True)
    with pytest.raises(OutputError, match="cannot make .*give another --out"):
        opened(tmp_path / "file" / "below", {}, force=False)


def test_files_of_a_model_that_was_there_are_replaced(tmp_path):
    for name, text in (("new", "2"), ("out", "1")):
        (tmp_path / name / "1_Pooling").mkdir(parents=True)
        (tmp_path / name / "1_Pooling" / "config.json").write_text(text)
        (tmp_path / name / "config.json").write_text(json.dumps(text))
    take(tmp_path / "new", tmp_path / "out")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "2"
    assert (tmp_path / "new" / "config.json").is_file(), "a command that is stopped here finds it again"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1_Pooling", "config.json"]


def test_a_folder_that_is_there_and_empty_is_taken(tmp_path):
    for force in (False, True):
        assert opened(tmp_path, {"target": 1}, force).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [".shrink"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_model_that_is_done_is_not_overwritten_unless_forced(tmp_path, is_damaged):
    (tmp_path / SHRINK_RECORD).write_text("{}")
    if is_damaged:
        (tmp_path / ".shrink").mkdir()
        (tmp_path / ".shrink" / "asked.json").write_text("{")
    with pytest.raises(OutputError, match="holds a finished model.*--force to make it again"):
        opened(tmp_path, {"target": 1}, force=False)
    opened(tmp_path, {"target": 1}, force=True)
    assert not (tmp_path / SHRINK_RECORD).exists()


def test_what_is_done_is_gone_on_with_where_all_models_were_kept(tmp_path):
    opened(tmp_path, {"target": 1}, force=False)
    (tmp_path / SHRINK_RECORD).write_text("{}")
    assert opened(tmp_path, {"target": 1}, force=False).is_dir()
    with pytest.raises(OutputError, match="started with another model"):
        opened(tmp_path, {"target": 2}, force=False)


def test_a_place_beside_what_is_read_is_no_overlap(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    refuse_overlap(tmp_path / "out", [tmp_path / "model", tmp_path / "out.txt"])
    refuse_overlap(tmp_path / "model" / "out", [tmp_path / "model"])  # nothing that is read is removed there
    for out in (tmp_path / "model", tmp_path / "link", tmp_path):
        with pytest.raises(OutputError, match="lies in --out"):
            refuse_overlap(out, [tmp_path / "elsewhere", tmp_path / "model"])


@pytest.mark.parametrize(("made", "notes"), [(False, False), (False, True), (True, False)])
def test_a_folder_of_work_without_a_model_is_removed_with_the_one_it_is_alone_in(tmp_path, made, notes):
    work = opened(tmp_path / "out", {}, force=False)
    (work / "models" / "a").mkdir(parents=True)
    if made:
        (work / "models" / "a" / "small-0.json").write_text("{}")
    if notes:
        (tmp_path / "out" / "notes.txt").write_text("mine")
    drop_if_empty(work)
    assert (work.exists(), (tmp_path / "out").exists()) == (made, made or notes)


def test_a_copy_is_made_where_a_file_cannot_have_two_names(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError("no links here")

    (tmp_path / "new").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "new" / "config.json").write_text("{}")
    take(tmp_path / "new", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").samefile(tmp_path / "new" / "config.json")
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    take(tmp_path / "new", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").samefile(tmp_path / "new" / "config.json")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
