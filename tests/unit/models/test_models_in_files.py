"""A model built in files has the bits of a model built in memory, and its weights are never in private memory."""

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import dry_run
from plimsoll.models.hugging_face import TextShape, load_hugging_face
from plimsoll.models.in_files import LEAST_BYTES, made_in
from plimsoll.models.recurrent.model import build_recurrent
from processes import run_program

SIDE = 512  # 1 MiB of float32


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000, n_positions=64))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=1000, num_labels=3, **sizes))


def lstm():
    return build_recurrent({"architecture": "lstm", "vocab_size": 1000, "embedding_size": 256, "hidden_size": 256})


class OwnWay(nn.Module):
    """A model that creates its weights in every way."""

    def __init__(self):
        super().__init__()
        shape = (SIDE, SIDE)
        made = {
            "randn": torch.randn(shape), "rand": torch.rand(shape), "zeros": torch.zeros(shape),
            "ones": torch.ones(shape), "full": torch.full(shape, 3.5), "scaled": torch.randn(shape) * 0.02,
            "turned": torch.randn(shape).t(), "half": torch.randn(shape).bfloat16(), "like": torch.zeros(shape),
            "drawn": torch.randn(shape, generator=torch.Generator().manual_seed(5)), "eye": torch.eye(SIDE),
        }  # fmt: skip
        made["like"] = (
            torch.randn_like(made["randn"]) + torch.rand_like(made["rand"]) + torch.full_like(made["rand"], 2)
        )
        made["new"] = made["like"].new_full(shape, 1.5) + made["like"].new_ones(shape) + torch.ones_like(made["rand"])
        for name, tensor in made.items():
            self.register_parameter(f"own_{name}", nn.Parameter(tensor))
        self.orthogonal = nn.init.orthogonal_(nn.Parameter(torch.empty(shape)))
        self.register_buffer("ids", torch.arange(SIDE * SIDE))


@pytest.mark.parametrize("build", [gpt2, bert, lstm, OwnWay])
def test_weights_and_random_numbers_are_those_of_a_build_in_memory(build):
    torch.manual_seed(3)
    plain, following = build(), torch.rand(4)
    torch.manual_seed(3)
    pool = MappedPool()
    with made_in(pool):
        model = build()
    assert torch.equal(torch.rand(4), following)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
        assert model.state_dict()[name].stride() == tensor.stride(), name
        assert pool.holds(model.state_dict()[name]) == (tensor.nbytes >= LEAST_BYTES), name


def test_what_is_for_another_device_or_made_after_the_block_is_left_alone():
    pool = MappedPool()
    with made_in(pool):
        with torch.device("meta"):
            assert nn.Linear(SIDE, SIDE).weight.is_meta
        small = torch.empty(3)
        views = torch.zeros(SIDE, SIDE)
        assert views.t().untyped_storage().data_ptr() == views.untyped_storage().data_ptr()
    assert not pool.holds(small)
    assert pool.holds(views)
    assert not pool.holds(torch.zeros(SIDE, SIDE))
    assert np.shares_memory(views.numpy(), views.t().numpy())


def test_a_dry_run_counts_them_outside_the_device():
    with dry_run(CpuLowering()) as stage:
        pool = MappedPool()
        with made_in(pool):
            layer = nn.Linear(SIDE, SIDE, bias=False)
        assert pool.holds(layer.weight)
        assert live_bytes(stage.trace()).peak_bytes == 0
        assert live_bytes(stage.trace(), on_host=True).peak_bytes == 4 * SIDE * SIDE


MEASURED = """
import torch
from torch import nn
from plimsoll.device.process import PeakCounter, private_bytes
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.models.hugging_face import TextShape, load_hugging_face
from plimsoll.models.in_files import made_in

with made_in(MappedPool()):
    nn.Linear(64, 64)
peak = PeakCounter()
peak.reset()
before = private_bytes()
with made_in(MappedPool()):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)])  # 128 MiB
    model.register_parameter("scaled", nn.Parameter(torch.randn(1024, 1024) * 2))
print((peak.read(private_bytes()) - before) >> 20)
"""


def test_private_memory_holds_no_more_than_one_of_them():
    done = run_program(MEASURED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 8


def test_a_checkpoint_is_read_into_files_and_can_be_trained(tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path)
    shape = TextShape(1000, None, 0, 32)
    pool = MappedPool()
    with made_in(pool):
        loaded = load_hugging_face(tmp_path, shape, "cpu", pool)
    plain = load_hugging_face(tmp_path, shape, "cpu")
    assert loaded.training
    assert loaded.config.use_cache is False
    for (name, one), other in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.requires_grad
        assert pool.holds(one) or one.nbytes < LEAST_BYTES, name
    with torch.no_grad():
        loaded.lm_head.weight.add_(1)  # which is tied, and can be written
    assert torch.equal(loaded.transformer.wte.weight, plain.transformer.wte.weight + 1)


def test_a_dry_run_reads_no_checkpoint(tmp_path):
    gpt2().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with dry_run(CpuLowering()) as stage:
        pool = MappedPool()
        with made_in(pool):
            load_hugging_face(tmp_path, TextShape(1000, None, 0, 32), "cpu", pool)
        assert live_bytes(stage.trace()).peak_bytes < LEAST_BYTES
