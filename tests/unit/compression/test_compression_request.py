"""What decides what a chain comes to, and what a model is judged by in words."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.compression.request import ShrinkOptions, ShrinkSource, decisive
from plimsoll.records.job import Job


def test_what_is_read_and_what_it_is_judged_by_are_named(tmp_path):
    (tmp_path / "model").mkdir()
    texts = ShrinkSource(tmp_path / "model", data=tmp_path / "x.txt")
    assert texts.belongings == (tmp_path / "model", tmp_path / "x.txt")
    assert texts.described == f"the texts of {tmp_path / 'x.txt'}"
    job = Job.from_fields({"model": str(tmp_path / "model"), "data": {"train": "x.txt", "validation": 0.25}})
    assert ShrinkSource(tmp_path / "model", job).described == "25% of the training data"


def test_which_chains_are_made_does_not_decide_what_they_come_to(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "x.txt").write_text("w1")
    source, options = ShrinkSource(tmp_path / "model", data=tmp_path / "x.txt"), ShrinkOptions()
    before = decisive(source, options)
    assert decisive(source, replace(options, target_bytes=9, forbids=("int8",), most_tries=1)) == before
    assert decisive(source, replace(options, most_samples=3)) != before
    assert decisive(source, replace(options, recover_steps=3)) != before
    (tmp_path / "x.txt").write_text("w1 w2")
    assert decisive(source, options) != before
