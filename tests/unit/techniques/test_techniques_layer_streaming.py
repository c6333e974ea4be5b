"""Weights of blocks on the host: the training is the same, and the device holds less.

There is rarely a GPU: the CPU stands in for one, and copies are made nevertheless.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from plimsoll.device.off_device import is_marked
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import dry_run_step
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step import failpoints
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from plimsoll.techniques.checkpointing import checkpointing_choice
from plimsoll.techniques.mechanisms.building import put_where_needed
from technique_trainings import TRAININGS, gpt2, setup_for
from workloads import weights_of

ALL, ONE = (Choice(technique="layer_streaming", options={"blocks": blocks}) for blocks in ("all", "1"))
BESIDE = {
    "alone": (),
    "checkpointing": (checkpointing_choice("all"),),
    "optimizer_offload": (Choice(technique="optimizer_offload", options={"to": "host"}),),
    "activation_offload": (Choice(technique="activation_offload", options={"to": "host"}),),
    "chunked_loss": (Choice(technique="chunked_loss", options={"chunk_tokens": 8}),),
    "optimizer_kernel": (Choice(technique="optimizer_kernel", options={"kernel": "fused"}),),
    "autocast": (Choice(technique="autocast", options={"dtype": "bf16"}), checkpointing_choice("all")),
    "optimizer_in_backward": (Choice(technique="optimizer_in_backward"),),
    "low_bit_optimizer": (Choice(technique="low_bit_optimizer", options={"bits": 8}),),
}


def trained(training, choices, size, is_whole):
    setup = setup_for(training, ["layer_streaming"])._replace(
        dropout=0.1, optimizer="adamw", clip_norm=None if is_whole else 1.0
    )
    fallbacks = [[*choices, micro_batch_choice(size)], [*choices, micro_batch_choice(size // 2)]]
    step = setup.step(fallbacks[: 1 if is_whole else 2])
    objects, losses = [*step.workload.model.parameters()], []
    for number, batch in enumerate(setup.case.batches()[:3]):
        torch.manual_seed(number)
        with nullcontext() if is_whole else failpoints.armed("backward", 2):
            losses.append(step(batch).loss)
    losses.append(step.evaluate(setup.case.batches()[:1]).loss)
    weights = weights_of(step.workload.model, step.workload.optimizer)
    step.close()
    assert all(one is other for one, other in zip(objects, step.workload.model.parameters(), strict=True))
    assert not any(map(is_marked, objects))
    return losses, weights


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", [ALL, ONE], ids=str)
@pytest.mark.parametrize("training", ["gpt2", "bert", "t5"])
@pytest.mark.parametrize("beside", BESIDE)
def test_three_steps_have_the_bits_of_those_without_also_after_running_out_of_memory(beside, training, choice):
    if beside in {"chunked_loss", "low_bit_optimizer"} and training != "gpt2":
        pytest.skip("the output layer is small, and so are all parameters")
    is_whole = beside == "optimizer_in_backward"
    losses, weights = trained(training, BESIDE[beside], 8, is_whole)
    found_losses, found = trained(training, (choice, *BESIDE[beside]), 8, is_whole)
    assert found_losses == losses
    assert [name for name in weights if not torch.equal(weights[name], found[name])] == []


def test_gradients_and_states_are_where_the_parameters_are_and_come_back():
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**TRAININGS["gpt2"].batches()[0]).loss.backward()
    optimizer.step()
    block, other = model.transformer.h[0].mlp.c_fc.weight, model.transformer.wte.weight
    moments = optimizer.state[block]["exp_avg"], optimizer.state[other]["exp_avg"]
    workload = Workload(model, optimizer, model_loss, "next-tokens")
    with installed(workload, [ALL]):
        assert is_marked(block)
        assert not is_marked(other)
        assert optimizer.state[block]["exp_avg"] is not moments[0]
        assert optimizer.state[other]["exp_avg"] is moments[1]
        optimizer.zero_grad()
        model(**TRAININGS["gpt2"].batches()[0]).loss.backward()
        assert block.grad is not None
        optimizer.step()
    assert not is_marked(block)
    assert not is_marked(block.grad)


def test_what_was_built_on_the_host_stays_there_after_the_exit():
    model = gpt2()
    put_where_needed(model, "cpu", [ALL])
    weight = model.transformer.h[0].mlp.c_fc.weight
    place = weight.data_ptr()
    with installed(Workload(model, torch.optim.SGD(model.parameters()), model_loss, "next-tokens"), [ALL]):
        pass
    assert is_marked(weight)
    assert weight.data_ptr() == place


@pytest.mark.long
def test_a_dry_run_for_cuda_counts_two_blocks_and_not_the_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 8, "n_embd": 256, "n_head": 4, "vocab_size": 300, "n_positions": 32, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLMLoss"))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(300, (4, 16))
    block_bytes = sum(one.nbytes for one in model.transformer.h[0].parameters())
    others_bytes = sum(one.nbytes for one in model.parameters()) - 8 * block_bytes

    def peak_bytes(*choices, on_host=False):
        trace = dry_run_step(
            model, optimizer, {"input_ids": ids, "labels": ids}, model_loss, CudaLowering((8, 6)), units="next-tokens",
            choices=(*choices, micro_batch_choice(2)), clip_norm=None, precision="fp32",
        )  # fmt: skip
        return live_bytes(trace, on_host=on_host).peak_bytes

    plain_bytes, streamed_bytes = peak_bytes(), peak_bytes(ALL)
    assert plain_bytes >= 4 * 8 * block_bytes
    # The model exists before the technique is installed, as in a user's program.
    assert streamed_bytes <= 9 * block_bytes + 8 * others_bytes
    assert peak_bytes(ALL, on_host=True) >= 4 * 8 * block_bytes


def test_a_sentence_says_why_not():
    technique, workload = TECHNIQUES["layer_streaming"], Workload(gpt2(), None, None, "samples")
    cuda = Setting("cuda", 8)
    assert technique.choices(workload, cuda) == (ALL,)
    assert "parameter_offload" in technique.choices(workload, Setting("cpu", 8))
    assert "parameter_offload" in technique.conflicts(ALL, (), workload, Setting("cpu", 8))
    assert technique.conflicts(ALL, (), workload, cuda) is None
    wrong = Choice(technique="layer_streaming", options={"blocks": "7"})
    assert "there is no block 7, the model has 2" in technique.conflicts(wrong, (), workload, cuda)
    no_blocks = Workload(nn.Linear(2, 2), None, None, "samples")
    assert "has no repeated blocks" in technique.choices(no_blocks, cuda)
    cells = nn.ModuleList(nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4)) for _ in range(3))
    assert "has a recurrent layer" in technique.choices(Workload(cells, None, None, "samples"), cuda)
    shared = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    holder = nn.ModuleDict({"blocks": shared, "again": nn.Linear(4, 4)})
    for number in range(2):
        shared[number][0] = holder["again"]
    assert "shared with the rest" in technique.choices(Workload(holder, None, None, "samples"), cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("beside", ["alone", "checkpointing", "optimizer_offload"])
def test_on_cuda_the_device_never_holds_the_blocks(beside):
    case = TRAININGS["gpt2"]
    torch.manual_seed(0)
    model = gpt2(dropout=0.0)
    put_where_needed(model, "cuda", [ALL])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, units=case.units, fallbacks=[[ALL, *BESIDE[beside], micro_batch_choice(4)]])
    losses = [step(batch).loss for batch in case.batches()[:3]]
    assert all(one.is_cpu and one.is_pinned() for one in model.transformer.h.parameters())
    torch.manual_seed(0)
    other = gpt2(dropout=0.0).cuda()
    plain = TrainStep(other, torch.optim.SGD(other.parameters(), lr=0.1), units=case.units, micro_batch=4)
    assert losses == pytest.approx([plain(batch).loss for batch in case.batches()[:3]], rel=1e-5)
