"""A pass on fake tensors needs what a real one needs, with the weights of absent parts left out to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from plimsoll.errors import InputError
from plimsoll.inference.dry_run import dry_run_inference
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.inference import Embed, Generate, Score
from plimsoll.records.trace import Trace
from plimsoll.techniques.mechanisms.parts import parts_of

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
EXPERTS = {  # products of one matrix for each expert, which torch's own rules know in bfloat16 only
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
def test_a_rehearsed_pass_needs_what_a_real_one_needs(config, auto_class, task):
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
    assert peak_bytes(here) - peak_bytes(there) == away[0].num_bytes  # of three
    assert live_bytes(there, on_host=True).peak_bytes >= sum(part.num_bytes for part in away)


@pytest.mark.parametrize("name", CONFIGS)
def test_new_tokens_are_a_second_step_with_all_keys_and_values(name):
    model, config = skeleton(CONFIGS[name]), CONFIGS[name]
    few, many = (traced(model, Generate(), new_tokens=new) for new in (1, 60))
    assert {step for step in few.ops.step if step} == {1}
    assert {step for step in many.ops.step if step} == {1, 2}
    seen = 24 + 60 - 1
    kept = min(seen, getattr(config, "sliding_window", None) or seen)
    heads = 4 if name == "gpt2" else 2  # of keys: all, or half of them
    found = [text for text in many.texts if text.startswith(f"float32[4, {heads}, ")]
    lengths = {int(text.split(", ")[2]) for text in found if text.endswith(", 8]")}
    assert max(lengths - {24}) == kept  # those that were kept, and its own
    assert kept - 1 in lengths
    assert f"int64[4, {seen}]" in many.texts  # the mask


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
def test_experts_are_rehearsed_beside_a_gpu_and_for_new_tokens(name):
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
