"""Checkpointed blocks compute the same bits, save nothing, and are restored afterwards."""

import copy
import gc
import weakref

import pytest
import torch
from tests.tally import Tally, in_a_check
from torch import nn
from traced_steps import dry_run, recorded
from transformers import AlbertConfig, AlbertForMaskedLM

from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.models.workload import model_loss
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.checkpointing import (
    Checkpointing,
    blocks_as_text,
    checkpointing_choice,
    chosen_blocks,
    saved_per_block,
)
from plimsoll.techniques.mechanisms.blocks import blocks_of
from processor import skip_without_half_lstm
from technique_models import WITH_BLOCKS, Block, Blocks, fresh, gpt2_with, workload_of
from workloads import Lstm

CPU = Setting(device="cpu", batch_size=8)
ALL = checkpointing_choice("all")


def bits_of(name, choices, dtype=None):
    """Return the loss, gradients, buffers and random state after one forward and backward pass."""
    model, batch = fresh(name)
    torch.manual_seed(1)
    with installed(workload_of(model), choices):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model_loss(model, batch)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": loss.detach(), "random numbers": torch.get_rng_state()} | gradients | buffers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("blocks", ["all", "every 2", "1"])
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_the_same_bits(name, blocks, dtype):
    if dtype is not None:
        skip_without_half_lstm(fresh(name)[0])
    plain, recomputed = bits_of(name, (), dtype), bits_of(name, (checkpointing_choice(blocks),), dtype)
    assert plain.keys() == recomputed.keys()
    assert [key for key in plain if not torch.equal(plain[key], recomputed[key])] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_what_is_predicted_is_what_is_needed_and_less_than_plain(name):
    model, batch = fresh(name)
    peaks = []
    for choices in ((), (ALL,)):
        predicted = live_bytes(dry_run(model, batch, choices)).peak_bytes
        if name != "lstms":  # oneDNN's recurrent layers save tensors that a recorder cannot see
            assert predicted == live_bytes(recorded(model, batch, choices)).peak_bytes
        peaks.append(predicted)
    assert peaks[1] < peaks[0]


def test_it_is_predicted_for_cuda_under_autocast():
    model, batch = fresh("gpt2")
    peaks = [
        live_bytes(dry_run(model, batch, choices, CudaLowering((8, 6)), precision="bf16")).peak_bytes
        for choices in ((), (ALL,))
    ]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("name", ["gpt2_with_cache", "t5", "blocks"])
def test_nothing_is_kept_after_backward(name):
    model, batch = fresh(name)
    with installed(workload_of(model), (ALL,)):
        hidden = []
        hook = blocks_of(model)[0][1].register_forward_hook(
            lambda module, args, output: hidden.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        )
        loss = model_loss(model, batch)
        assert hidden[0]() is not None
        loss.backward()
        del loss
        gc.collect()
        assert hidden[0]() is None
        hook.remove()


def test_a_cache_that_is_given_is_read_and_filled_as_without():
    """The prefix has two layers: each block reads its layer, and the caller's cache grows once."""
    from transformers import DynamicCache

    def filled(choices):
        model, batch = fresh("gpt2_with_cache")
        generator = torch.Generator().manual_seed(3)
        cache = DynamicCache()
        prefix = [torch.randn(8, 2, 3, 8, generator=generator).requires_grad_() for _ in range(4)]
        for layer in range(2):
            cache.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
        torch.manual_seed(1)
        with installed(workload_of(model), choices):
            model(**batch, past_key_values=cache).loss.backward()
        return [*(tensor.grad for tensor in prefix), cache.layers[0].keys.detach(), cache.layers[1].values.detach()]

    plain, recomputed = filled(()), filled((ALL,))
    assert plain[4].shape == (8, 2, 15, 8)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def test_without_gradients_a_block_runs_plainly(monkeypatch):
    model, batch = fresh("gpt2")
    with installed(workload_of(model), (ALL,)), torch.no_grad():
        assert (
            live_bytes(traced_forward(model, batch)).peak_bytes == live_bytes(traced_forward(model, batch)).peak_bytes
        )
        with_it = model(**batch, use_cache=True)
    torch.manual_seed(1)
    assert with_it.past_key_values.get_seq_length() == 12


def traced_forward(model, batch):
    from plimsoll.memory.recorder import Recorder

    recorder = Recorder()
    with recorder:
        model(**batch)
    return recorder.trace("measured", "cpu")


def test_the_model_is_restored_exactly():
    model, _ = fresh("gpt2")
    own = model.transformer.h[1].forward
    model.transformer.h[1].forward = own
    before = [dict(vars(module)) for module in model.modules()]
    keys = list(model.state_dict())
    with installed(workload_of(model), (ALL,)):
        assert list(model.state_dict()) == keys
        assert "forward" in vars(model.transformer.h[0])
    assert [dict(vars(module)) for module in model.modules()] == before
    assert "forward" not in vars(model.transformer.h[0])
    assert vars(model.transformer.h[1])["forward"] is own


def test_a_copy_of_an_installed_model_runs_itself():
    model, batch = fresh("gpt2")
    with installed(workload_of(model), (ALL,)):
        other = copy.deepcopy(model)
        model_loss(other, batch).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
def test_a_step_that_fails_is_done_again(phase):
    def trained(*, fails):
        model, batch = fresh("gpt2")
        fallbacks = [[ALL, micro_batch_choice(8)], [ALL, micro_batch_choice(4)]]
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), units="samples", fallbacks=fallbacks)
        torch.manual_seed(1)
        if fails:
            with armed(phase, 1):
                assert len(step(batch).oom_events) == 1
        else:
            step.begin_again_at(1)
            step(batch)
        return model.state_dict()

    plain, failed = trained(fails=False), trained(fails=True)
    assert all(torch.equal(plain[key], failed[key]) for key in plain)


def test_memory_that_runs_out_while_recomputing():
    """A part of a block is first called in forward, and again when backward recomputes it."""
    results = []
    for fails in (False, True):
        model, batch = fresh("bert")
        part, calls = blocks_of(model)[0][1].attention, Tally()

        def hook(module, args, fails=fails, calls=calls):
            if not in_a_check() and calls.next() == 2 and fails:
                raise RuntimeError(
                    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
                )

        part.register_forward_pre_hook(hook)
        fallbacks = [[ALL, micro_batch_choice(8)], [ALL, micro_batch_choice(4)]]
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), units="samples", fallbacks=fallbacks)
        torch.manual_seed(1)
        if not fails:
            step.begin_again_at(1)
        result = step(batch)
        assert len(result.oom_events) == fails
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_one_layer_that_is_called_again_and_again():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "embedding_size": 16}
    config = AlbertConfig(**sizes, num_hidden_layers=4, vocab_size=50, hidden_dropout_prob=0.1)
    _, batch = fresh("gpt2")
    results = []
    for choices in ((), (ALL,)):
        torch.manual_seed(0)
        model = AlbertForMaskedLM(config).train()
        with installed(workload_of(model), choices):
            model_loss(model, batch).backward()
        results.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# -- what can be chosen ------------------------------------------------------------------------------------------------


def test_the_choices_are_weakest_first():
    model = gpt2_with(n_layer=6)
    assert [str(choice) for choice in Checkpointing().choices(workload_of(model), CPU)] == [
        "checkpointing=every 4",
        "checkpointing=every 2",
        "checkpointing=all",
    ]
    two = Checkpointing().choices(workload_of(gpt2_with()), CPU)
    assert [str(choice) for choice in two] == ["checkpointing=all"]


def test_why_nothing_applies():
    choices_of = Checkpointing().choices
    assert choices_of(workload_of(Lstm()), CPU) == "the model Lstm has no repeated blocks"
    model = gpt2_with()
    model.activation_checkpointing_enable()
    assert "the model checkpoints its layers itself" in choices_of(workload_of(model), CPU)
    assert "the model checkpoints its layers itself" in conflict_among((ALL,), workload_of(model), CPU)
    wide = gpt2_with(n_layer=1, n_embd=2, n_head=1, vocab_size=20_000)
    trace = dry_run(wide, {"input_ids": torch.ones(2, 4, dtype=int), "labels": torch.ones(2, 4, dtype=int)})
    reason = choices_of(workload_of(wide), Setting(device="cpu", batch_size=2, trace=trace))
    assert reason.startswith("the 1 blocks save ")
    assert "of activations" in reason


def test_dropout_of_a_recurrent_layer_on_cuda_is_refused():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.LSTM(4, 4, num_layers=2, dropout=0.1) for _ in range(2)])
    choices_of = Checkpointing().choices
    assert choices_of(workload_of(model), Setting(device="cuda", batch_size=8)) == (
        "layers.0 has a recurrent layer, and cuDNN would draw another dropout mask in backward"
    )
    assert not isinstance(choices_of(workload_of(model), CPU), str)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("every 9", "cannot read the blocks `every 9` at `every 9`: give `all`, `every 2`, or numbers from 0 to 1"),
        ("0,9", "there is no block 9, the model has 2: give `all`, `every 2`, or numbers from 0 to 1"),
        ("most", "cannot read the blocks `most` at `most`"),
        ("every 0", "cannot read the blocks `every 0`"),
        ("1-0", "cannot read the blocks `1-0` at `1-0`"),
        ("0,,1", "cannot read the blocks `0,,1` at ``"),
    ],
)
def test_blocks_that_cannot_be(text, reason):
    workload = workload_of(gpt2_with())
    assert reason in conflict_among((checkpointing_choice(text),), workload, CPU)
    with pytest.raises(InputError), installed(workload, (checkpointing_choice(text),)):
        pass


def test_texts_of_blocks():
    assert chosen_blocks("all", 3) == (0, 1, 2)
    assert chosen_blocks("every 4", 9) == (0, 4, 8)
    assert chosen_blocks("5,0-2,1", 6) == (0, 1, 2, 5)
    for numbers in ((), (0,), (0, 1, 2), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)):
        text = blocks_as_text(numbers, 6)
        assert not numbers or chosen_blocks(text, 6) == numbers
    assert blocks_as_text((0, 2, 3, 5), 6) == "0,2-3,5"


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, *args, **kwargs):
        self.num_calls += 1
        return super().forward(*args, **kwargs)


def test_a_block_that_changes_a_buffer_is_refused():
    model = Blocks()
    model.block2 = Counting()
    model.block3 = Counting()
    _, batch = fresh("blocks")
    with (
        installed(workload_of(model), (checkpointing_choice("0-1"),)),
        pytest.raises(InputError, match="cannot checkpoint block2: its forward changes its buffer num_calls"),
    ):
        model_loss(model, batch)


# -- what a planner asks -----------------------------------------------------------------------------------------------


class Square(nn.Module):
    """A block that saves the results of exp and tanh for backward, and returns a third tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.part = nn.Identity()

    def forward(self, hidden):
        exponential = torch.exp(self.part(hidden * self.weight))
        return exponential * torch.tanh(exponential)


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Square(), Square(), Square())

    def forward(self, x, labels):
        from workloads import Output

        return Output(self.blocks(x).square().mean())


def test_what_blocks_keep_by_hand():
    """Each block saves exp, tanh and the result, of 8 x 10 floats; the product with the weight is freed."""
    model = Squares()
    batch = {"x": torch.rand(8, 10), "labels": torch.zeros(8)}
    names = tuple(name for name, _ in blocks_of(model))
    assert names == ("blocks.0", "blocks.1", "blocks.2")
    trace = dry_run(model, batch)
    assert saved_per_block(trace, names) == saved_per_block(recorded(model, batch), names)
    assert saved_per_block(trace, names) == ((3 * 320, 320),) * 3


def test_the_largest_of_several_passes_counts():
    """A layer norm makes its statistics after its result; BERT's blocks keep tensors of the size of hidden states."""
    model, batch = fresh("bert")
    names = tuple(name for name, _ in blocks_of(model))
    kept = [block.kept_bytes for block in saved_per_block(dry_run(model, batch), names)]
    assert kept == [8 * 12 * 16 * 4] * 2


def test_tensors_given_by_keyword_are_seen_by_torch(monkeypatch):
    """torch saves the random state only for devices of positional tensors."""
    seen = []
    real = torch.utils.checkpoint.checkpoint

    def spy(function, *args, **kwargs):
        seen.append(sorted(tensor.dim() for tensor in args))
        return real(function, *args, **kwargs)

    monkeypatch.setattr("plimsoll.techniques.checkpointing.checkpoint", spy)
    model, batch = fresh("blocks")
    with installed(workload_of(model), (ALL,)):
        model_loss(model, batch).backward()
    assert seen == [
        [0, 3],
        [0, 0, 3],
        [0, 0, 3],
    ]  # the dimensions of the scale, of the tensors in `seen`, and of hidden states
