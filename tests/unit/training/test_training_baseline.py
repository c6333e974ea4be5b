"""The baseline report of a process that has loaded a training without a model."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plimsoll.records.job import Job
from plimsoll.training.baseline import print_baseline

OWN_MODEL = """
from torch import nn
def build(vocab_size, num_labels, end_id):
    print(vocab_size, num_labels, end_id)
    return nn.Linear(2, 2)
"""


@pytest.mark.parametrize(("task", "num_labels"), [("language-modeling", None), ("classification", 2)])
def test_what_a_process_takes_without_its_model_is_measured_with_all_that_a_model_of_ones_own_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str,
    num_labels: int | None,
) -> None:  # fmt: skip
    (tmp_path / "own_model_of_a_test.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model_of_a_test", raising=False)
    fields = {"model": "own_model_of_a_test:build", "task": task, "data": "nowhere.txt"}
    job = Job.from_fields(fields | {"tokenizer": {"vocab_size": 300}})
    monkeypatch.setattr(sys, "stdin", io.StringIO(job.to_json()))
    print_baseline()
    *given, num_bytes = capsys.readouterr().out.splitlines()
    assert given == [f"300 {num_labels} 0"]
    assert int(num_bytes) > 50 << 20


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_are_measured_with_what_their_exchanges_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_ranks: int
) -> None:
    joined: list[Any] = []
    join = dist.init_process_group

    def note_and_join(*args: Any, **kwargs: Any) -> None:
        joined.append(args[0])
        join(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", note_and_join)
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt", "ranks": num_ranks})
    monkeypatch.setattr(sys, "stdin", io.StringIO(job.to_json()))
    print_baseline()
    assert joined == ([] if num_ranks == 1 else ["gloo"])
    assert int(capsys.readouterr().out) > 50 << 20
    assert not dist.is_initialized()
