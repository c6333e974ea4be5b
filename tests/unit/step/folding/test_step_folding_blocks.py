"""Folding of alike blocks: the trace equals the trace of running each block, and blocks that may differ are run."""

from functools import partial
from random import Random as Rng
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn

from folded_traces import all_run, written_out
from plimsoll.data.batch import batch_size_of
from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run import step
from plimsoll.planning.dry_run.step import dry_run_job, dry_run_step
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.folding import blocks as folded_blocks
from plimsoll.step.folding.blocks import BlocksDiffer
from plimsoll.techniques import TECHNIQUES, in_order
from plimsoll.techniques.checkpointing import checkpointing_choice

LOWERINGS = {"cpu": CpuLowering(), "cuda": CudaLowering((8, 6))}
TEXTS = TextSketch(vocab_size=1100, num_labels=None, end_id=0)
SMALL = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
FEW_KEYS = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1}
ARCHITECTURES = {
    "gpt2": {"n_layer": 5, "n_embd": 16, "n_head": 2},
    "llama": FEW_KEYS,
    "qwen2": FEW_KEYS,
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "gpt_neox": SMALL | {"intermediate_size": 32},
    "mixtral": FEW_KEYS | {"num_local_experts": 2},
}
OFFLOADED = {
    "cpu": [
        (Choice(technique="optimizer_offload", options={"to": "disk"}),),
        (Choice(technique="parameter_offload", options={"gradients": True}),),
        (Choice(technique="parameter_offload", options={"gradients": False}), checkpointing_choice("all")),
    ],
    "cuda": [(Choice(technique="optimizer_offload", options={"to": "host"}), checkpointing_choice("all"))],
}
COMBINATIONS = [
    (checkpointing_choice("all"),),
    (checkpointing_choice("1-4"),),
    (Choice(technique="chunked_loss", options={"chunk_tokens": 16}),),
    (Choice(technique="chunked_loss", options={"chunk_tokens": 16}), checkpointing_choice("all")),
]


@pytest.fixture
def noted(monkeypatch):
    """Return the list of the numbers of folded blocks."""
    numbers, note = [], folded_blocks._Row._note

    def counted(self, number, given, example):
        numbers.append(number)
        return note(self, number, given, example)

    monkeypatch.setattr(folded_blocks._Row, "_note", counted)
    return numbers


def job(architecture, precision="fp32"):
    fields = {"data": {"train": "nowhere.txt"}, "sequence_length": 16, "batch_size": 14, "optimizer": {"clip_norm": 1}}
    return Job.from_fields(
        fields | {"model": {"architecture": architecture, **ARCHITECTURES[architecture]}, "precision": precision}
    )


def job_traced(architecture, target, precision="fp32", combination=()):
    choices = in_order((micro_batch_choice(4), *combination))
    return partial(dry_run_job, job(architecture, precision), TEXTS, LOWERINGS[target], choices)


TRAININGS = [(one, "fp32") for one in ARCHITECTURES] + [("gpt2", "fp16"), ("gpt2", "bf16"), ("llama", "bf16")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", LOWERINGS)
@pytest.mark.parametrize(("architecture", "precision"), TRAININGS)
def test_the_trace_is_that_of_running_all_blocks(architecture, target, precision, noted, monkeypatch):
    """Each pass that runs folds three of five blocks. With a gradient scaler, the first pass creates its scale."""
    trace = job_traced(architecture, target, precision)
    all_run(monkeypatch, trace)  # a warm-up: the first trace imports modules and fills caches of torch
    folded = trace()
    assert noted == [1, 2, 3] * (4 if precision == "fp16" else 3)
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("target", "combination"),
    [(one, combination) for one in LOWERINGS for combination in (*COMBINATIONS, *OFFLOADED[one])],
)
def test_the_trace_with_techniques_is_that_of_running_all_blocks(target, combination, noted, monkeypatch):
    trace = job_traced("llama", target, "bf16", combination)
    all_run(monkeypatch, trace)
    folded = trace()
    assert noted
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


@pytest.mark.parametrize("technique", sorted(one.name for one in TECHNIQUES.values() if one.spans_blocks))
def test_blocks_are_run_where_a_technique_goes_on_from_one_to_the_next(technique, noted):
    options = {"layer_streaming": {"blocks": "all"}, "activation_offload": {"to": "host"}}[technique]
    job_traced("gpt2", "cuda", combination=[Choice(technique=technique, options=options)])()
    assert noted == []


def of_transformers(kind):
    """Return the class as if it were defined in transformers, whose code is known."""
    kind.__module__ = "transformers.of_test"
    forward = kind.forward
    names = {**forward.__globals__, "__name__": kind.__module__}
    kind.forward = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
    return kind


@of_transformers
class Block(nn.Module):
    """A block that may behave differently if its number is `odd`."""

    def __init__(self, number, odd=-1):
        super().__init__()
        self.number, self.odd = number, odd
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden, scale=None):
        inner = self.first(hidden).relu()
        if self.number == self.odd:
            inner = inner.sigmoid()
        return hidden + self.second(inner)


@of_transformers
class OddBackward(Block):
    """A block of which only the backward pass differs."""

    def forward(self, hidden, scale=None):
        inner = self.first(hidden).relu()
        if self.number == 0:
            inner.register_hook(torch.clone)
        return hidden + self.second(inner)


@of_transformers
class TwoResults(Block):
    def forward(self, hidden, scale=None):
        return super().forward(hidden) * 1.0, hidden * 2.0


@of_transformers
class Model(nn.Module):
    """A row of blocks, each called with ``arguments(number)``."""

    def __init__(self, blocks, arguments=lambda number: {}, order=None):
        super().__init__()
        blocks = [*blocks]
        self.begin, self.blocks, self.end = (
            nn.Embedding(11, 8),
            nn.ModuleList(blocks),
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1)),
        )
        self.arguments, self.order = arguments, order or range(len(blocks))

    def forward(self, input_ids):
        hidden = self.begin(input_ids)
        for number in self.order:
            hidden = self.blocks[number](hidden, **self.arguments(number))
            if isinstance(hidden, tuple):
                hidden = hidden[0] + hidden[1]
        return SimpleNamespace(loss=self.end(hidden).mean())


@of_transformers
class UsedElsewhere(Model):
    """A model that also uses an input, output or parameter of a middle block elsewhere."""

    def __init__(self, use):
        super().__init__(map(Block, range(5)))
        self.use = use

    def forward(self, input_ids):
        hidden, kept, before = self.begin(input_ids), 0.0, None
        for number, block in enumerate(self.blocks):
            before, hidden = hidden, block(hidden)
            if number == 2 and self.use == "its result, at the end":
                kept = hidden
            if number == 2 and self.use == "its result, at once":
                kept = (hidden * hidden).sum()
            if number == 2 and self.use == "its result, in memory":
                self.memory = hidden.detach()
            if number == 2 and self.use == "its result without its graph":
                hidden = before + hidden.detach()
            if number == 3 and self.use == "its parameter":
                kept = block.first.weight.sum()
        result = self.end(hidden + kept) if self.use == "its result, at the end" else self.end(hidden) + kept
        return SimpleNamespace(loss=result.mean())


def model_traced(model):
    batch = {"input_ids": torch.zeros(8, 4, dtype=torch.int64)}
    options = {"choices": (micro_batch_choice(4),), "clip_norm": None, "precision": "fp32", "units": batch_size_of}
    optimizer = torch.optim.AdamW(model.parameters())
    return partial(dry_run_step, model, optimizer, batch, model_loss, CpuLowering(), **options)


DIFFERING = {
    "the last does something else": lambda: Model([Block(number, odd=3) for number in range(4)]),
    "the backward pass of the first does": lambda: Model(map(OddBackward, range(4))),
    "one is given something else": lambda: Model(map(Block, range(4)), lambda number: {"scale": number == 2}),
    "one is called twice": lambda: Model(map(Block, range(4)), order=[0, 1, 1, 2, 3]),
    "the first is called again": lambda: Model(map(Block, range(4)), order=[0, 1, 2, 3, 0]),
    **{
        f"used elsewhere: {use}": partial(UsedElsewhere, use)
        for use in (
            "its result, at the end",
            "its result, at once",
            "its result, in memory",
            "its result without its graph",
            "its parameter",
        )
    },
    "they are called in another order": lambda: Model(map(Block, range(4)), order=[0, 2, 1, 3]),
}


@pytest.mark.parametrize("kind", DIFFERING)
def test_where_blocks_turn_out_to_differ_all_are_run(kind, noted, monkeypatch):
    trace = model_traced(DIFFERING[kind]())
    folded = trace()
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))
    monkeypatch.setattr(step, "_folding_blocks", lambda trace_with: partial(trace_with, folds_blocks=True))
    with pytest.raises(BlocksDiffer):
        trace()


def test_models_whose_last_block_is_not_called_are_run(monkeypatch):
    trace = model_traced(Model(map(Block, range(4)), order=[0, 1, 2]))
    assert written_out(trace()) == written_out(all_run(monkeypatch, trace))


@pytest.mark.parametrize(
    "model",
    [
        lambda: Model(map(TwoResults, range(4))),
        lambda: Model([Block(0), Block(1)]),
        lambda: Model([Block(0), Block(1), TwoResults(2), Block(3), Block(4)]),
    ],
    ids=["two results", "two blocks", "rows of two"],
)
def test_blocks_of_another_kind_are_run(model, noted, monkeypatch):
    trace = model_traced(model())
    folded = trace()
    assert noted == []
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


def test_own_blocks_of_known_code_are_noted(noted, monkeypatch):
    trace = model_traced(Model(map(Block, range(4))))
    folded = trace()
    assert noted == [1, 2] * 2
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


def test_what_is_computed_between_blocks_is_run(noted, monkeypatch):
    @of_transformers
    class Between(Model):
        def forward(self, input_ids):
            hidden = kept = self.begin(input_ids)
            for block in self.blocks:
                hidden = block(hidden) * 0.5 + kept
            return SimpleNamespace(loss=self.end(hidden).mean())

    trace = model_traced(Between(map(Block, range(4))))
    folded = trace()
    assert noted
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


def test_layers_that_transformers_checkpoints_itself_are_noted(noted, monkeypatch):
    """transformers puts a list of handles into each layer, under a name that hooks have, too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**FEW_KEYS, vocab_size=64, use_cache=False)).train()
    model.activation_checkpointing_enable()
    batch = {"input_ids": torch.zeros(8, 4, dtype=torch.int64), "labels": torch.zeros(8, 4, dtype=torch.int64)}
    options = {"choices": (micro_batch_choice(4),), "clip_norm": None, "precision": "fp32", "units": batch_size_of}
    optimizer = torch.optim.AdamW(model.parameters())
    trace = partial(dry_run_step, model, optimizer, batch, model_loss, CpuLowering(), **options)
    all_run(monkeypatch, trace)
    folded = trace()
    assert noted
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


USES = {
    "nothing": lambda hidden, block: 0.0,
    "its sum": lambda hidden, block: hidden.sum(),
    "its square": lambda hidden, block: (hidden * hidden).sum(),
    "its slice": lambda hidden, block: hidden[:, 0].sum(),
    "its value": lambda hidden, block: hidden.detach().sum(),
    "a weight": lambda hidden, block: block.first.weight.sum(),
    "the square of a weight": lambda hidden, block: block.second.weight.square().sum(),
}


@of_transformers
class Random(Model):
    """A model with random uses, between blocks, of the hidden tensor or of the next block."""

    def __init__(self, seed):
        random = Rng(seed)
        super().__init__(map(Block, range(random.randint(3, 6))))
        same = random.choice(["nothing", "nothing", "nothing", *USES]) if random.random() < 0.7 else None
        self.uses = [same or random.choice([*USES]) for _ in self.blocks]
        self.is_kept, self.is_late = random.random() < 0.2, random.random() < 0.3
        self.skip = random.choice([None, None, None, "all", "one"])

    def forward(self, input_ids):
        hidden = self.begin(input_ids)
        more, kept, first = [], [], hidden
        for number, (block, use) in enumerate(zip(self.blocks, self.uses, strict=True)):
            if not self.is_late:
                more.append(USES[use](hidden, block))
            kept += [hidden] if self.is_kept else []
            hidden = block(hidden)
            if self.is_late:
                more.append(USES[use](hidden, block))
            if self.skip == "all" or (self.skip == "one" and number == 1):
                hidden = hidden + first
        return SimpleNamespace(loss=self.end(hidden).mean() + sum(more), kept=kept)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(40), range(40, 80)], ids=str)
def test_random_uses_of_what_goes_from_block_to_block_change_nothing(seeds, noted, monkeypatch):
    different = []
    for seed in seeds:
        trace = model_traced(Random(seed))
        if written_out(trace()) != written_out(all_run(monkeypatch, trace)):
            different.append((seed, Random(seed).uses))
    assert different == []
    assert noted
