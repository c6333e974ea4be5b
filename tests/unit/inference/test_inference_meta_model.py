"""What a plan is made from is read without a weight, and what cannot be planned is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from plimsoll.errors import InputError, JobError
from plimsoll.inference.meta_model import Applied
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.recurrent.model import build_recurrent, save_recurrent
from small_checkpoints import gpt2, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("checkpoints") / "gpt2", "gpt2")


def test_the_model_is_there_without_its_weights(folder):
    applied = Applied.open(folder, "score", None, 0)
    assert all(weight.is_meta for weight in applied.model.parameters())
    assert [part.kind for part in applied.parts] == ["block"] * 4 + ["output", "tables", "rest"]
    assert applied.files == (folder / "model.safetensors",)
    assert (applied.dtype, applied.is_converted, applied.num_passes) == ("float32", False, 1)
    assert applied.described == "GPT2LMHeadModel, 0.2 M weights"


def test_weights_are_of_the_type_they_are_stored_in_or_converted_to(folder, tmp_path):
    stored = saved(tmp_path / "half", "gpt2", torch.bfloat16)
    assert Applied.open(stored, "score", None, 0).dtype == "bfloat16"
    converted = Applied.open(folder, "score", torch.bfloat16, 0)
    assert (converted.dtype, converted.is_converted) == ("bfloat16", True)


@pytest.mark.parametrize(("padding", "chosen"), [(None, 0), (5, 5)])
def test_a_classifier_without_a_token_for_padding_gets_one(tmp_path, padding, chosen):
    config = gpt2(pad_token_id=padding).config
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    assert Applied.open(tmp_path, "classify", None, 0).model.config.pad_token_id == chosen


def test_new_tokens_are_passes(folder):
    assert [Applied.open(folder, "generate", None, new).num_passes for new in (0, 1, 7)] == [1, 1, 7]
    with pytest.raises(
        InputError, match=r"3 new tokens were asked for, and the task `score` makes none: leave them out"
    ):
        Applied.open(folder, "score", None, 3)


def test_rows_that_the_model_cannot_read_are_refused(folder):
    applied = Applied.open(folder, "generate", None, 5)
    applied.require_length(60)
    with pytest.raises(
        InputError, match=r"rows of 61 tokens and 5 new ones are longer than .*, 64 tokens: give shorter"
    ):
        applied.require_length(61)
    for new_tokens in (0, 1):  # the first is computed with the row's own
        alone = Applied.open(folder, "generate", None, new_tokens)
        alone.require_length(64)
        with pytest.raises(InputError, match=r"rows of 65 tokens"):
            alone.require_length(65)


def test_rows_of_any_length_are_read_where_nothing_says_how_many_positions_there_are(folder):
    applied = Applied.open(folder, "score", None, 0)
    applied.model.config = SimpleNamespace(max_position_embeddings=None)
    applied.require_length(1 << 20)


@pytest.mark.parametrize(("num_of_64", "expected"), [(3, "float64"), (2, "float32")])
def test_the_type_is_that_of_most_bytes_and_not_of_most_weights(folder, num_of_64, expected):
    applied = Applied.open(folder, "score", None, 0)
    weights = nn.ParameterDict(
        {"of_64": torch.zeros(num_of_64, dtype=torch.float64), "of_32": torch.zeros(5, dtype=torch.float32)}
    )
    assert replace(applied, model=weights).dtype == expected


def test_a_pass_is_the_tasks_own(folder):
    applied = Applied.open(folder, "score", None, 0)
    trace = applied.dry_run(CpuLowering(), rows=2, longest_tokens=16, outside=())
    assert not any(weight.requires_grad for weight in applied.model.parameters())
    assert not applied.model.training
    assert set(trace.ops.phase) <= {"setup", "forward"}
    assert "aten.logsumexp.default" in trace.texts or any("log_softmax" in text for text in trace.texts)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="config.json cannot be read"):
        Applied.open(tmp_path, "score", None, 0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(InputError, match=str(tmp_path)):
        Applied.open(tmp_path, "score", None, 0)


def test_a_task_that_the_model_is_not_for_is_refused(folder):
    with pytest.raises(JobError, match="cannot classify texts"):
        Applied.open(folder, "classify", None, 0)
    with pytest.raises(JobError, match="there is no task `read`"):
        Applied.open(folder, "read", None, 0)


def test_a_recurrent_model_is_applied_as_a_whole(tmp_path):
    fields = {"architecture": "lstm", "vocab_size": 50, "embedding_size": 8, "hidden_size": 8}
    save_recurrent(build_recurrent(fields), tmp_path)
    with pytest.raises(InputError, match=r"is a recurrent model, which has no blocks to place: leave out the plan"):
        Applied.open(tmp_path, "score", None, 0)
