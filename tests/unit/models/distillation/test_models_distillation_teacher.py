"""A teacher: loaded without gradients, refused if it does not fit, and identified by a digest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distillations import KINDS, LABELS, VOCABULARY, batch_of, model_of, task_of
from plimsoll.device.off_device import outside_the_device
from plimsoll.errors import JobError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import dry_run
from plimsoll.models.build import save_model
from plimsoll.models.distillation.teacher import digest_of, load_teacher, require_same_tokens, sketch_teacher
from plimsoll.models.hugging_face import TextShape

LM, CLASSIFIER = TextShape(VOCABULARY, None, 0, 16), TextShape(VOCABULARY, LABELS, 0, 16)


def shape_of(kind: str) -> TextShape:
    return CLASSIFIER if task_of(kind) == "classification" else LM


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in KINDS:
        made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        save_model(model_of(kind, 1), made[kind])
    return made


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_says_what_it_said_when_it_was_saved(folders: dict[str, Path], kind: str, place: Any) -> None:
    teacher = load_teacher(folders[kind], task_of(kind), shape_of(kind), place=place)
    assert not teacher.training
    assert not any(one.requires_grad for one in teacher.parameters())
    fields = {name: value for name, value in batch_of(kind).items() if name != "labels"}
    expected = model_of(kind, 1).eval()(**fields).logits
    torch.testing.assert_close(teacher(**fields).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_reads_no_file(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders[kind] / "config.json").read_text())
    with dry_run(CpuLowering()) as stage, outside_the_device():
        teacher = load_teacher(tmp_path, task_of(kind), shape_of(kind))
        assert all(hasattr(one, "fake_mode") for one in teacher.parameters())
        stage.recorder.know_teacher(teacher)
    storages = stage.trace().storages
    assert any(storages.on_host)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"distill.teacher: there is no folder .*nowhere: give the folder"):
        sketch_teacher(tmp_path / "nowhere", "classification", CLASSIFIER)
    with pytest.raises(JobError, match=r"distill.teacher: .* is not a Hugging Face checkpoint"):
        sketch_teacher(tmp_path, "classification", CLASSIFIER)
    with pytest.raises(JobError, match=r"distill.teacher: .* cannot be read"):
        digest_of(tmp_path)


@pytest.mark.parametrize(
    ("kind", "task", "changes", "message"),
    [
        ("gpt2", "language-modeling", {"vocab_size": 60}, "50 token embeddings, but the tokenizer has 60 tokens"),
        ("lstm", "language-modeling", {"vocab_size": 60}, "50 token embeddings, but the tokenizer has 60 tokens"),
        ("bert classifier", "classification", {"num_labels": 5}, "has 3 labels, but the data have 5"),
        ("lstm classifier", "classification", {"num_labels": 5}, "has 3 labels, but the data have 5"),
        ("gpt2", "language-modeling", {"sequence_length": 64}, "n_positions 32 cannot hold sequence_length 64"),
        ("lstm", "classification", {"num_labels": 3}, "is for language-modeling, but the task is classification"),
        ("bert classifier", "language-modeling", {"num_labels": None}, "lacks|lack"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sizes(
    folders: dict[str, Path], kind: str, task: Any, changes: dict[str, Any], message: str
) -> None:
    shape = shape_of(kind)._replace(**changes)
    with pytest.raises(JobError, match=rf"distill.teacher: .*{message}"):
        sketch_teacher(folders[kind], task, shape)


def test_a_model_without_the_head_of_the_task_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(
        JobError, match=r"was not trained for classification, because it lacks 1 weights \(score.weight\)"
    ):
        sketch_teacher(folders["gpt2"], "classification", CLASSIFIER._replace(num_labels=2))


@pytest.mark.parametrize("kind", ["bert classifier", "lstm classifier"])
def test_labels_in_another_order_are_refused(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    shutil.copytree(folders[kind], folder)
    fields = json.loads((folder / "config.json").read_text())
    names = ("bad", "fair", "good")
    fields |= {"id2label": dict(enumerate(names))} if kind == "bert classifier" else {"label_names": names}
    (folder / "config.json").write_text(json.dumps(fields))
    sketch_teacher(folder, "classification", CLASSIFIER, names)
    sketch_teacher(folder, "classification", CLASSIFIER)
    with pytest.raises(JobError, match="label 0 is 'bad' in .*, but 'good' in the data"):
        sketch_teacher(folder, "classification", CLASSIFIER, names[::-1])
    sketch_teacher(folders[kind], "classification", CLASSIFIER, names)  # whose labels have no names


def test_a_teacher_is_known_by_what_it_is_and_not_by_where(folders: dict[str, Path], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folders["gpt2"], moved)
    assert digest_of(moved) == digest_of(folders["gpt2"])
    save_model(model_of("gpt2", 2), moved)
    assert digest_of(moved) != digest_of(folders["gpt2"])


def test_a_single_changed_number_makes_another_teacher(tmp_path: Path) -> None:
    model = model_of("gpt2", 1)
    big = torch.nn.Linear(256, 1024)  # so that no sample of the file's beginning, end or middle has all of it
    model.add_module("big", big)
    seen = set()
    for row in range(0, 1024, 64):
        with torch.no_grad():
            big.weight[row, 7] += 1
        save_model(model, tmp_path)
        seen.add(digest_of(tmp_path))
    assert len(seen) == 16


def test_other_tokens_are_refused_by_name(tmp_path: Path) -> None:
    require_same_tokens(tmp_path, {"a": 0, "b": 1}, {"b": 1, "a": 0})
    with pytest.raises(JobError, match=r"the id of 'b' is 1 in the teacher's and 2 in the job's; set `tokenizer: "):
        require_same_tokens(tmp_path, {"a": 0, "b": 1}, {"a": 0, "c": 1, "b": 2})
    with pytest.raises(JobError, match="the id of 'c' is null in the teacher's and 1 in the job's"):
        require_same_tokens(tmp_path, {"a": 0}, {"a": 0, "c": 1})
