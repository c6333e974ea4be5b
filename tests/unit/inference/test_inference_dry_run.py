"""Dry runs of inference: the trace equals the real pass, and impossible plans are refused before it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from plimsoll.errors import InputError, JobError
from plimsoll.inference.dry_run import Applied, dry_run_inference
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.inference import Embed, Generate, Score
from plimsoll.models.recurrent.model import build_recurrent, save_recurrent
from plimsoll.records.trace import Trace
from plimsoll.techniques.mechanisms.parts import parts_of
from small_checkpoints import gpt2, saved

TOKENS = {"vocab_size": 90, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "gpt2": GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=128, **TOKENS),
    "llama": LlamaConfig(**LLAMA, **TOKENS),
    "mistral": MistralConfig(**LLAMA, sliding_window=12, **TOKENS),
}
EXPERTS = {  # products with one matrix per expert, which torch's own decompositions support in bfloat16 only
    "mixtral": MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, **TOKENS),
    "qwen3-moe": Qwen3MoeConfig(
        **LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **TOKENS
    ),
}
BERT = BertConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, **TOKENS)


def skeleton(config, auto_class=AutoModelForCausalLM) -> nn.Module:
    with torch.device("meta"):
        return auto_class.from_config(config).eval().requires_grad_(False)


def traced(model: nn.Module, task=Score(), lowering=None, **options) -> Trace:
    options = {"rows": 4, "longest_tokens": 24} | options
    return dry_run_inference(model, task.compute, lowering or CpuLowering(), **options)


def peak_bytes(trace: Trace) -> int:
    return live_bytes(trace).peak_bytes


@pytest.mark.parametrize(
    ("config", "auto_class", "task"),
    [
        (CONFIGS["gpt2"], AutoModelForCausalLM, Score()),
        (CONFIGS["llama"], AutoModelForCausalLM, Score()),
        (BERT, AutoModel, Embed()),
        *((config, AutoModelForCausalLM, Score()) for config in EXPERTS.values()),
    ],
    ids=["gpt2", "llama", "bert", *EXPERTS],
)
def test_a_dry_run_of_a_pass_needs_what_a_real_one_needs(config, auto_class, task):
    trace = traced(skeleton(config, auto_class), task)
    model = auto_class.from_config(config).eval()
    ids = torch.randint(90, (4, 24))
    recorder = Recorder(phase=lambda: "forward")
    recorder.step = 1
    with torch.no_grad(), recorder:
        recorder.know_model(model)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        recorder.know(batch.items(), "inputs")
        task.compute(model, batch)
    assert peak_bytes(trace) == peak_bytes(recorder.trace("measured", "cpu"))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_that_are_elsewhere_do_not_count(name):
    model = skeleton(CONFIGS[name])
    away = {part.name: part.num_bytes for part in parts_of(model) if part.is_streamable}
    here, there = traced(model), traced(model, outside=away)
    assert peak_bytes(here) - peak_bytes(there) == sum(away.values())
    assert live_bytes(there, on_host=True).peak_bytes == sum(away.values())


def test_beside_a_gpu_two_blocks_are_copied_at_a_time():
    model = skeleton(CONFIGS["llama"])
    away = [part for part in parts_of(model) if part.kind == "block"]
    here = traced(model, lowering=CudaLowering((8, 6)))
    there = traced(model, lowering=CudaLowering((8, 6)), outside=[part.name for part in away])
    assert peak_bytes(here) - peak_bytes(there) == away[0].num_bytes  # one of three
    assert live_bytes(there, on_host=True).peak_bytes >= sum(part.num_bytes for part in away)


@pytest.mark.parametrize("name", CONFIGS)
def test_new_tokens_are_a_second_step_with_all_keys_and_values(name):
    model, config = skeleton(CONFIGS[name]), CONFIGS[name]
    few, many = (traced(model, Generate(), new_tokens=new) for new in (1, 60))
    assert {step for step in few.ops.step if step} == {1}
    assert {step for step in many.ops.step if step} == {1, 2}
    seen = 24 + 60 - 1
    kept = min(seen, getattr(config, "sliding_window", None) or seen)
    heads = 4 if name == "gpt2" else 2  # key heads: all, or half of them
    found = [text for text in many.texts if text.startswith(f"float32[4, {heads}, ")]
    lengths = {int(text.split(", ")[2]) for text in found if text.endswith(", 8]")}
    assert max(lengths - {24}) == kept  # the cached tokens, and the current one
    assert kept - 1 in lengths
    assert f"int64[4, {seen}]" in many.texts  # the attention mask


@pytest.mark.parametrize(("new_tokens", "steps"), [(0, {1}), (1, {1}), (2, {1, 2})])
def test_the_first_new_token_is_of_the_prefill(new_tokens, steps):
    trace = traced(skeleton(CONFIGS["gpt2"]), Generate() if new_tokens else Score(), new_tokens=new_tokens)
    assert {step for step in trace.ops.step if step} == steps


def test_random_numbers_of_the_caller_stay_as_they_are():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    traced(skeleton(CONFIGS["gpt2"]))
    assert torch.equal(torch.rand(3), expected)


def test_more_rows_need_more_and_so_do_longer_ones():
    model = skeleton(CONFIGS["gpt2"])
    shapes = ((1, 24), (8, 24), (1, 96))
    few, many, long = (peak_bytes(traced(model, rows=rows, longest_tokens=tokens)) for rows, tokens in shapes)
    assert few < many
    assert few < long


@pytest.mark.parametrize("name", EXPERTS)
def test_there_is_a_dry_run_of_experts_beside_a_gpu_and_for_new_tokens(name):
    model = skeleton(EXPERTS[name])
    away = [part.name for part in parts_of(model) if part.kind == "block"]
    trace = traced(model, Generate(), lowering=CudaLowering((8, 6)), outside=away, new_tokens=5)
    assert {step for step in trace.ops.step if step} == {1, 2}
    assert sum(trace.ops.flops) > 0
    assert trace.assumptions == ()


def test_the_model_stays_as_it_is():
    model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    traced(model, outside=["transformer.h.0"])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_model_that_fails_says_where():
    model = skeleton(CONFIGS["gpt2"])
    with pytest.raises(InputError, match=r"the model GPT2LMHeadModel fails in the \w+ phase"):
        dry_run_inference(model, lambda model, batch: model(batch), CpuLowering(), rows=1, longest_tokens=4)


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
        InputError, match=r"3 new tokens were requested, but the task `score` generates none: leave them out"
    ):
        Applied.open(folder, "score", None, 3)


def test_rows_that_the_model_cannot_read_are_refused(folder):
    applied = Applied.open(folder, "generate", None, 5)
    applied.require_length(60)
    with pytest.raises(InputError, match=r"rows of 61 tokens and 5 new ones exceed .* of 64 tokens: give shorter"):
        applied.require_length(61)
    for new_tokens in (0, 1):  # the row's own pass computes the first token
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
