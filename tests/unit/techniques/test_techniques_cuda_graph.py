"""CUDA graphs are offered if passes have one shape and only kernels, and count in predicted time and memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.cuda.gpus import find_gpu
from plimsoll.device.speed import speed_of
from plimsoll.memory.annotations import private_storages
from plimsoll.memory.predict import count_on_cuda
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.planning.search.time_model import _stretches, step_duration
from plimsoll.planning.targets import gpu_target
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import TECHNIQUES, Setting, installed
from plimsoll.techniques.cuda_graph import CudaGraph

GRAPH = Choice(technique="cuda_graph")
CUDA = Setting("cuda", batch_size=8)
JOB = Job.from_fields({
    "model": {"architecture": "gpt2", "n_positions": 64, "n_layer": 2, "n_embd": 64, "n_head": 2},
    "data": {"train": "nowhere.txt"}, "tokenizer": {"train": "bpe", "vocab_size": 500}, "sequence_length": 64,
    "batch_size": 8, "precision": "bf16", "optimizer": {"name": "adamw", "lr": 3e-4, "clip_norm": 1.0},
})  # fmt: skip
CARD = find_gpu("H200")


def workload(*layers):
    model = nn.Sequential(nn.Linear(4, 4), *layers)
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, "samples")


def test_it_is_offered_on_cuda_alone():
    assert CudaGraph().choices(workload(), CUDA) == (GRAPH,)
    assert CudaGraph().choices(workload(), Setting("cpu", batch_size=8)) == "a CPU has no CUDA graphs"


@pytest.mark.parametrize(
    ("made", "setting", "why"),
    [
        (workload(), Setting("cuda", batch_size=8, num_ranks=2), "this training has 2"),
        (workload(), Setting("cuda", batch_size=8, lengths_vary=True), "a graph has one shape"),
        (workload(nn.LSTM(4, 4, num_layers=2, dropout=0.5)), CUDA, "1 uses dropout of cuDNN"),
        (workload(nn.Embedding(4, 4, sparse=True)), CUDA, "1 has sparse gradients"),
        (workload(nn.LSTM(4, 4, num_layers=2), nn.Embedding(4, 4)), CUDA, None),
    ],
)
def test_what_the_training_forbids(made, setting, why):
    found = CudaGraph().conflicts(GRAPH, (), made, setting)
    assert found is None if why is None else why in found


def test_it_goes_with_what_can_be_captured():
    for name in ("layer_streaming", "optimizer_in_backward"):
        assert (
            CudaGraph().conflicts(GRAPH, (Choice(technique=name),), workload(), CUDA)
            == TECHNIQUES[name].not_captured
            != ""
        )
    others = (micro_batch_choice(2), Choice(technique="checkpointing", options={"blocks": "all"}))
    assert CudaGraph().conflicts(GRAPH, others, workload(), CUDA) is None


def test_the_exit_gives_back_what_was_captured():
    class Captured:
        is_released = False

        def release(self):
            self.is_released = True

    made, one = workload(), Captured()
    with installed(made, [GRAPH]):
        assert made.hooks.captured == []
        made.hooks.captured.append(one)
    assert one.is_released
    assert made.hooks.captured is None


# -- predicted ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces():
    """Return traces of three steps, 8 samples in micro-batches of 3, without a graph and with one."""
    found = {}
    for more in ((), (GRAPH,)):
        choices = (micro_batch_choice(3), *more)
        found[bool(more)] = dry_run_job(JOB, TextSketch(500, None, 0), gpu_target(CARD, None).lowering(), choices)
    return found


def test_whole_micro_batches_are_a_graphs_from_the_second_step_on(traces):
    trace = traces[True]
    assert traces[False].captured == ()
    assert len(trace.captured) == 2 * 2  # of two steps, and not the smaller last ones
    phases = {trace.ops.phase[row] for begin, end in trace.captured for row in range(begin, end)}
    assert phases == {"forward", "loss", "backward"}
    assert {trace.ops.step[begin] for begin, _ in trace.captured} == {2, 3}
    lengths = {end - begin for begin, end in trace.captured}
    assert len(lengths) == 1


def test_a_pass_that_reads_its_masks_is_not_predicted_as_a_graphs():
    """A plan must not count on a graph that the run will refuse."""
    fields = {"architecture": "bert", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    job = JOB.model_copy(update={"model": {**fields, "intermediate_size": 32}, "task": "classification"})
    lowering, texts = gpu_target(CARD, None).lowering(), TextSketch(500, 3, 0)
    traces = [dry_run_job(job, texts, lowering, (micro_batch_choice(3), *more)) for more in ((), (GRAPH,))]
    assert traces[1].captured == ()
    assert traces[1].events == traces[0].events


def test_gradients_are_the_same_tensors_in_all_steps_but_the_first(traces):
    def born(trace):
        rows = zip(trace.storages.category, trace.storages.born, trace.storages.name, strict=True)
        return [(trace.texts[name], trace.ops.step[row]) for category, row, name in rows if category == "gradients"]

    plain, graph = born(traces[False]), born(traces[True])
    assert {step for _, step in plain} == {1, 2, 3}
    assert {step for _, step in graph} == {1, 2}
    assert len(graph) == 2 * len({name for name, _ in graph})
    private = private_storages(traces[True])
    assert not any(traces[True].storages.category[one] == "parameters" for one in private)


def test_it_takes_more_memory_and_less_time(traces):
    counted = {name: count_on_cuda(trace, CARD) for name, trace in traces.items()}
    speed = speed_of(CARD)
    plain, graph = (
        step_duration(counted[name], speed, batch_size=8, micro_batch=3, dry_run_samples=8).likely_seconds
        for name in (False, True)
    )
    assert graph < 0.7 * plain
    held = sum(
        traces[True].storages.num_bytes[one]
        for one in private_storages(traces[True])
        if traces[True].storages.category[one] == "activations"
    )
    assert held
    assert counted[True].most_reserved.likely_bytes > counted[False].most_reserved.likely_bytes


def recorded():
    """Return the recorded results and times of steps with graphs on a real GPU."""
    path = Path(__file__).parents[3] / "benchmarks" / "recorded" / "h200-cuda-graph-torch2.11.0.json.gz"
    return [row for row in json.loads(gzip.decompress(path.read_bytes()))["rows"] if row["replays"]]


def test_recorded_steps_were_those_of_the_eager_ones_to_the_bit():
    exact = [row for row in recorded() if row["deterministic"]]
    assert len(exact) == 2
    assert all(row["losses_same"] and row["weights_same"] == row["weights"] for row in exact)


@pytest.mark.long
@pytest.mark.parametrize("row", recorded(), ids=lambda row: f"{row['choices']} of {row['batch']}")
def test_recorded_memory_and_replays_are_as_predicted(row):
    """Memory is within 1 % and time within 5 %. Deterministic kernels are a fifth slower; some need more memory."""
    job = JOB.model_copy(update={"batch_size": row["batch"], "sequence_length": row["length"]})
    job = job.model_copy(update={"model": {"architecture": "gpt2", "n_positions": 512}})
    choices = tuple(
        {
            "micro_batch": micro_batch_choice(row["micro"]),
            "checkpointing": Choice(technique="checkpointing", options={"blocks": "all"}),
            "cuda_graph": GRAPH,
        }[word.partition("=")[0]]
        for word in row["choices"].split(" + ")
    )
    trace = dry_run_job(job, TextSketch(8000, None, 0), gpu_target(CARD, None).lowering(), choices)
    counted = count_on_cuda(trace, CARD)
    rows = zip(trace.storages.num_bytes, trace.storages.category, strict=True)
    weights_bytes = sum(num_bytes for num_bytes, category in rows if category == "parameters")
    own_bytes = row["reserved"] - (row["base"] - weights_bytes)
    assert counted.most_reserved.likely_bytes == pytest.approx(own_bytes, rel=0.04 if row["deterministic"] else 0.01)
    seconds = _stretches(counted, speed_of(CARD), None, None)[0][1]
    assert seconds == pytest.approx(row["replay"], rel=0.2 if row["deterministic"] else 0.05)
