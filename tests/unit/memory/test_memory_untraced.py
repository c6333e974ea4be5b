"""A model that asks whether it is traced takes the way of the real run, and is left as it was."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import import_utils

from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.memory.untraced import untraced


def test_fake_tensors_pass_for_real_ones_inside_the_block_only():
    asked = import_utils.is_fake_tensor
    fake = FakeTensorMode().from_tensor(torch.ones(2))
    with untraced():
        assert not import_utils.is_tracing(fake)
    assert import_utils.is_tracing(fake)
    assert import_utils.is_fake_tensor is asked


def test_a_model_without_padding_builds_no_mask_although_its_tensors_are_fake():
    """Positions that a caller gives are where GPT-2 looks for packed sequences."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=4, n_head=2, n_layer=1, n_positions=8))
    model.config.use_cache = False

    def train(place: DryRun) -> None:
        ids = place.fake_batch(torch.zeros(2, 8, dtype=torch.int64))
        place.fake_model(model)(input_ids=ids, position_ids=place.fake_batch(torch.arange(8)[None]), labels=ids)

    trace = trace_training(train, CpuLowering())
    shapes = {trace.texts[shape] for shape in trace.storages.shape}
    assert "bool[2, 1, 8, 8]" not in shapes
