"""The folder that a smaller model is made in: whose it is, and what is left of it."""

from __future__ import annotations

import json

import pytest

from plimsoll.errors import OutputError
from plimsoll.run.shrink_folder import SHRINK_RECORD, opened, take


def test_the_same_command_goes_on_and_another_one_does_not(tmp_path):
    work = opened(tmp_path / "out", {"target": 1}, force=False)
    (work / "made").write_text("much")
    assert (opened(tmp_path / "out", {"target": 1}, force=False) / "made").is_file()
    with pytest.raises(OutputError, match="begun with another model, data or options.*--force to begin anew"):
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
