"""The first dry run of a process equals the second: it imports, queries and builds nothing on the way."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from processes import environment

PROGRAM = """
import json, sys
from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.planning.dry_run.step import dry_run_job

fields, on_card, techniques = json.loads(sys.argv[1])
job = Job.from_fields(fields)
texts = TextSketch(vocab_size=2048, num_labels=3 if job.is_labelled else None, end_id=0)
lowering = CudaLowering((8, 6)) if on_card else CpuLowering()
given = (micro_batch_choice(2), *(Choice(technique=name, options=options) for name, options in techniques))

def traced():
    trace = json.loads(dry_run_job(job, texts, lowering, given).to_json())
    events = sorted(zip(trace.pop("event_op"), trace.pop("events")))  # autocast's cache frees in the order of addresses
    return trace | {"sorted": events}

first, second = traced(), traced()
print(json.dumps([name for name in first if first[name] != second[name]]), len(first["sorted"]))
"""
SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {"architecture": "llama", "num_key_value_heads": 2, **SMALL}
MAMBA = {"architecture": "mamba", "num_hidden_layers": 2, "hidden_size": 8}
BERT = {"architecture": "bert", **SMALL}
GPT2 = {"architecture": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2}
MOE = {"architecture": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1,
       "moe_intermediate_size": 8, **SMALL}  # fmt: skip
NET = {"embedding_size": 8, "hidden_size": 8}
CHECKPOINTS = [["checkpointing", {"blocks": "all"}]]


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.parametrize("on_card", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    ("changes", "techniques"),
    [
        ({"model": {"architecture": "lstm", **NET}}, []),
        ({"model": {"architecture": "lstm", **NET}, "precision": "bf16"}, []),
        ({"model": {"architecture": "gru", **NET}, "precision": "fp16"}, []),
        ({"model": {"architecture": "rnn", **NET}, "task": "token-classification"}, []),
        ({"model": GPT2}, CHECKPOINTS),
        ({"model": GPT2, "precision": "fp16"}, []),
        ({"model": BERT, "task": "classification"}, []),
        ({"model": LLAMA, "precision": "bf16"}, [["chunked_loss", {"chunk_tokens": 4}]]),
        ({"model": MAMBA}, []),
        ({"model": MOE, "optimizer": {"name": "adafactor"}}, []),
    ],
    ids=str,
)
def test_the_first_trace_of_a_process_equals_the_second(changes, techniques, on_card):
    fields = {"data": {"train": "nowhere.txt"}, "sequence_length": 8, "batch_size": 4, **changes}
    given = json.dumps([fields, on_card, techniques])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], env=environment(), capture_output=True, text=True, check=False
    )
    if "no bf16 kernels" in done.stderr:
        pytest.skip("this processor has none")
    assert done.returncode == 0, done.stderr
    different, num_events = done.stdout.rsplit(maxsplit=1)
    assert json.loads(different) == []
    assert int(num_events) > 100
