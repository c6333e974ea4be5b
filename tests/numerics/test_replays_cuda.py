"""Replays of real CUDA graphs: the trainings of `test_step_cuda_graphs_replays.py`, and limits of a real GPU."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.errors import PlimsollWarning
from plimsoll.models.workload import model_loss
from replayed import CHECKPOINTING, GRAPH, NUM_STEPS, WIDTH, Net, both, refused, require_the_same_bits, trained

pytestmark = pytest.mark.gpu


@pytest.fixture
def deterministic(monkeypatch):
    """Use deterministic kernels: by default some add gradients in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def texts(num_steps=NUM_STEPS, length=32):
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(100, (8, length), generator=generator) for _ in range(num_steps)]
    return [{"input_ids": one, "labels": one} for one in ids]


def decoder(dropout=0.1):
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("more", [(), (CHECKPOINTING,)], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_real_graphs_are_the_eager_steps_with_dropout(deterministic, more, precision):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlimsollWarning)
        replays = both(decoder(), *more, loss=model_loss, data=texts(), precision=precision, device="cuda")
    assert replays.num_replays == 2 * (NUM_STEPS - 1)


def test_kernels_that_add_in_any_order_are_replayed_as_near_as_they_are_to_themselves():
    """By default, in long texts of few words, the gradients of embeddings vary from run to run."""
    from technique_trainings import relative_distance

    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, (64, 64), generator=generator) for _ in range(NUM_STEPS)]
    data = [{"input_ids": one, "labels": one} for one in ids]
    net, options = decoder(), {"loss": model_loss, "data": data, "micro_batch": 32, "precision": "bf16"}
    plain, graph = (trained(net, *more, device="cuda", **options) for more in ((), (GRAPH,)))
    assert graph[2].num_replays == 2 * (NUM_STEPS - 1)
    # Adam makes full-size steps even for gradients that are only rounding errors.
    assert graph[0] == pytest.approx(plain[0], rel=1e-2)
    assert relative_distance(graph[1], plain[1]) < 0.1


def test_a_real_graph_counts_the_statistics_of_batch_norm(deterministic):
    assert both(Net(), device="cuda").num_replays == 2 * (NUM_STEPS - 1)


def test_real_graphs_follow_shapes(deterministic):
    data = [*texts(2), *texts(8, length=16)]
    assert both(decoder(), loss=model_loss, data=data, device="cuda").num_replays > 4


def test_what_cuda_refuses_runs_eagerly_and_its_memory_comes_back(deterministic):
    def waits(x):
        torch.cuda.synchronize()
        return x

    trained(Net(), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    assert "captur" in refused(Net(between=waits), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before_bytes + (2 << 20)


def test_a_real_limit_without_room_for_the_graph(deterministic):
    """Eager passes fit into the limit, but the tensors that they save for backward do not fit twice."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4096), nn.Linear(4096, 4)

        def forward(self, x):
            for _ in range(8):
                wide = torch.sin(self.up(x.repeat(2048, 1)))
                x = x + self.down(wide).view(2048, -1, 4).mean(0).repeat(1, 4)
            return x[:, :3]

    expected = trained(Wide(), device="cuda", micro_batch=4)
    torch.cuda.empty_cache()
    backend = plimsoll.device.base.backend_for("cuda")
    torch.cuda.reset_peak_memory_stats()
    trained(Wide(), device="cuda", micro_batch=4)
    peak_bytes = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    fraction = (peak_bytes + (8 << 20)) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlimsollWarning)
            found = trained(Wide(), GRAPH, device="cuda", micro_batch=4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    require_the_same_bits(found, expected)
    assert backend.use().reserved_bytes <= peak_bytes + (8 << 20)
