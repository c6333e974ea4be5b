"""The transaction on a GPU: the phases of tests/numerics/test_transaction.py with CUDA's errors, and a real limit."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import transformers

from plimsoll.device.base import backend_for
from plimsoll.planning.predict_step import predict
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.commit import StepCommit
from workloads import BATCH_SIZE, CASES, Case, largest_relative_difference, plain_loop, weights_of

pytestmark = pytest.mark.gpu
NUM_STEPS = 4
CLOSE = 1e-5
MIB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Use deterministic kernels: by default the gradients of embeddings are summed in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_cuda(case: Case) -> Case:
    return replace(
        case,
        build=lambda: case.build().cuda(),
        data=lambda: {name: tensor.cuda() for name, tensor in case.data().items()},
    )


def plain(case: Case, cuts: list[int]) -> dict[str, torch.Tensor]:
    model, optimizer = case.fresh()
    plain_loop(case, model, optimizer, cuts)
    return weights_of(model, optimizer)


@pytest.mark.parametrize("phase", ["copy", "forward", "loss", "backward", "clip", "optimizer"])
@pytest.mark.parametrize("case", [on_cuda(case) for case in CASES], ids=lambda case: case.name)
def test_an_oom_in_any_phase_loses_nothing(case, phase):
    """The errors come in step 3, where the same size has fitted before and is tried again."""
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units, clip_norm=1.0)
    step._commit = StepCommit(optimizer, step.backend, step.position, chunk_bytes=1)
    num_pieces = len(list(model.parameters()))
    with armed(phase, 2 * num_pieces + 2 if phase == "optimizer" else 3):
        results = [step(batch) for batch in case.batches()]
    assert [result.micro_batch for result in results] == [BATCH_SIZE] * NUM_STEPS
    assert results[2].oom_events or phase == "optimizer"
    assert largest_relative_difference(plain(case, [BATCH_SIZE] * NUM_STEPS), weights_of(model, optimizer)) == 0


def test_a_real_limit_cuts_the_batch_and_the_loss_stays():
    """Logits of 64 samples need some 2 GiB with their gradient; the limit leaves 1 GiB."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 32_000)).cuda()
    batch = torch.randint(0, 100, (64, 64))

    def loss(model, ids):
        return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    expected = loss(model, batch.cuda()).item()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units="samples")
    backend = backend_for("cuda")
    gc.collect()  # memory of earlier tests must not be freed inside the limit
    with backend.limited(backend.baseline_bytes() + 1024 * MIB):
        result = step(batch)
    assert result.micro_batch < 64
    assert {event.family for event in result.oom_events} == {"cuda"}
    assert result.loss == pytest.approx(expected, rel=CLOSE)


def test_after_one_event_the_batch_is_whole_again_within_ten_steps():
    """Memory runs out once, in the first forward pass. Afterwards clean steps show that the batch fits."""
    case = on_cuda(CASES[0])
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units)
    batch = next(iter(case.batches()))
    backend = backend_for("cuda")
    with backend.limited(backend.baseline_bytes() + 4096 * MIB):  # an injected error does not report a size
        with armed("forward", 1):
            first = step(batch)
        assert len(first.oom_events) == 1
        assert first.micro_batch < BATCH_SIZE
        assert [step(batch).micro_batch for _ in range(10)][-1] == BATCH_SIZE


@pytest.mark.parametrize("num_key_heads", [1, 2])
def test_what_attention_with_shared_keys_takes_is_what_was_predicted(num_key_heads):
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=num_key_heads,
    )  # fmt: skip
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = transformers.LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(8, 512, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    predicted = predict(model, optimizer, batch, units="next-tokens", precision="bf16", device="cuda")
    torch.cuda.reset_peak_memory_stats()
    step = TrainStep(model, optimizer, units="next-tokens", precision="bf16")
    for _ in range(3):
        step(batch)
    measured = torch.cuda.max_memory_allocated() - before
    assert predicted.allocated.likely_bytes == pytest.approx(measured, rel=0.03, abs=4 * MIB)
