"""Placed models: the same bits wherever their parts are, and an unchanged model if nothing is offloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing._internal.two_tensor import TwoTensor

from plimsoll.device.cpu.pages import stretches_of
from plimsoll.device.process import private_bytes
from plimsoll.errors import DeviceError, InputError, JobError
from plimsoll.inference.placement import _over_link, _streamed, placed_model
from plimsoll.models.inference import inference_task
from plimsoll.planning.plan_inference import plan_inference
from plimsoll.records.placement import InferencePlan
from plimsoll.techniques.mechanisms.parts import parts_of
from small_checkpoints import FAMILIES, batch, saved

AUTO_CLASSES = {
    "language-modeling": transformers.AutoModelForCausalLM,
    "classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "none": transformers.AutoModel,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    dtypes = (torch.float32, torch.bfloat16)
    return {(name, dtype): saved(root / f"{name}-{dtype}", name, dtype) for name in FAMILIES for dtype in dtypes}


@pytest.fixture(scope="module")
def plans(folders):
    """Return plans in which every part is resident, for a card, since a plan for the CPU measures a process."""
    return {
        (name, dtype): plan_inference(folder, FAMILIES[name][1], longest_tokens=20, most_rows=2, device="rtx3060")
        .model_copy(update={"device_kind": "cpu"})
        for (name, dtype), folder in folders.items()
    }  # fmt: skip


def with_resident(plan: InferencePlan, *resident: str, **changes: object) -> InferencePlan:
    """Return the plan with these parts in memory and the others on disk."""
    parts = tuple(
        part
        if part.name in (*resident, "the rest")
        else part.model_copy(update={"place": "disk", "is_streamed": part.name != "embeddings"})
        for part in plan.parts
    )
    return plan.model_copy(update={"parts": parts, **changes})


def computed(folder: Path, plan: InferencePlan, num_passes: int = 2) -> list[torch.Tensor]:
    task = inference_task(plan.task, folder)
    with placed_model(folder, plan) as model, torch.inference_mode():
        found = [task.compute(model, batch()) for _ in range(num_passes)]
    return [part for results in found for part in results]


def plain(folder: Path, task_name: str) -> list[torch.Tensor]:
    task = inference_task(task_name, folder)
    model = AUTO_CLASSES[task.head].from_pretrained(folder, dtype="auto").eval()
    with torch.inference_mode():
        return [part for _ in range(2) for part in task.compute(model, batch())]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_where_the_parts_lie_changes_no_bit(folders, plans, name, dtype):
    folder, plan = folders[name, dtype], plans[name, dtype]
    blocks = [part.name for part in plan.parts if part.name[-1].isdigit()]
    assert len(blocks) == 4
    expected = plain(folder, plan.task)
    placements = (
        plan,
        with_resident(plan),
        with_resident(plan, read_bytes=1, cached_bytes=0),  # every part is dropped from the cache
        with_resident(plan, blocks[1], blocks[3], read_bytes=1, cached_bytes=plan.parts[0].num_bytes),
        with_resident(plan, *blocks),
    )
    for placement in placements:
        for found, wanted in zip(computed(folder, placement), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_beside_a_gpu_the_copies_change_no_bit(folders, plans, name):
    folder, plan = folders[name, torch.float32], plans[name, torch.float32]
    task = inference_task(plan.task, folder)
    blocks = [part.name for part in plan.parts if part.name[-1].isdigit()]
    stays = {part.name for part in plan.parts} - set(blocks) | {blocks[2]}
    model = AUTO_CLASSES[task.head].from_pretrained(folder, dtype="auto").eval().requires_grad_(False)
    with (
        torch.inference_mode(False),
        _over_link(model, parts_of(model), with_resident(plan, *stays), torch.device("cpu")),
        torch.no_grad(),
    ):
        found = [part for _ in range(2) for part in task.compute(model, batch())]
    assert all(map(torch.equal, found, plain(folder, plan.task)))


def test_ties_stay_ties(folders, plans):
    folder, plan = folders["gpt2", torch.float32], plans["gpt2", torch.float32]
    with placed_model(folder, with_resident(plan, "output layer")) as model:
        assert model.lm_head.weight is model.transformer.wte.weight


def test_only_what_stays_takes_private_memory(tmp_path):
    folder = saved(tmp_path / "wide", "llama", hidden_size=512, intermediate_size=1024)
    plan = plan_inference(folder, "score", longest_tokens=8, most_rows=1, device="cpu")
    streamed = with_resident(plan, read_bytes=1)
    before = private_bytes()
    with placed_model(folder, streamed) as model, torch.inference_mode():
        inference_task("score", folder).compute(model, batch(1, 8))
        taken_bytes = private_bytes() - before
    assert plan.num_bytes > 30 << 20
    assert taken_bytes < 10 << 20


@pytest.mark.parametrize("is_streamed", [False, True], ids=["blocks stay", "blocks are streamed"])
def test_an_output_layer_that_is_streamed_is_read_after_the_last_block(folders, plans, is_streamed):
    folder, plan = folders["llama", torch.float32], plans["llama", torch.float32]
    blocks = [part for part in plan.parts if part.name[-1].isdigit()]
    # The page cache can hold the streamed blocks, and not the output layer.
    free_bytes = sum(part.num_bytes for part in blocks) if is_streamed else 0
    resident = () if is_streamed else [part.name for part in blocks]
    placement = with_resident(plan, *resident, read_bytes=1, cached_bytes=free_bytes)
    with placed_model(folder, placement) as model:
        *before, last = _streamed(parts_of(model), placement)
        assert last.module is model.model.layers[-1]
        assert (last.stretches, last.following) == ((), stretches_of([model.lm_head.weight]))
        assert last.is_dropped
    assert len(before) == (len(blocks) if is_streamed else 0)
    assert not any(part.is_dropped or part.following for part in before)


@pytest.mark.parametrize(
    ("read_bytes", "missing_bytes", "dropped"),
    [
        (0, 10**9, []),
        (1, 0, [2, 3, 4]),
        (1, 1, [1, 2, 3]),  # the output layer, which is smaller, fits into the rest
    ],
    ids=["nothing is read again", "room for two", "one byte too little for two"],
)
def test_what_the_page_cache_keeps_are_the_first_parts_that_it_has_room_for(
    folders, plans, read_bytes, missing_bytes, dropped
):
    folder, plan = folders["llama", torch.float32], plans["llama", torch.float32]
    free_bytes = max(2 * plan.parts[0].num_bytes - missing_bytes, 0)
    placement = with_resident(plan, read_bytes=read_bytes, cached_bytes=free_bytes)
    with placed_model(folder, placement) as model:
        streamed = _streamed(parts_of(model), placement)
    assert [number for number, part in enumerate(streamed) if part.is_dropped] == dropped
    assert len(streamed) == 5


def test_quantized_blocks_are_not_copied_to_a_gpu(folders, plans):
    plan = plans["gpt2", torch.float32]
    model = AUTO_CLASSES["language-modeling"].from_pretrained(folders["gpt2", torch.float32])
    norm = model.transformer.h[1].ln_1
    norm.weight = torch.nn.Parameter(TwoTensor(norm.weight.detach(), norm.weight.detach()))
    with pytest.raises(InputError, match="1 weights are quantized, but blocks of a quantized model cannot be streamed"):
        _over_link(model, parts_of(model), with_resident(plan), torch.device("cpu")).__enter__()


def test_a_plan_that_does_not_fit_is_refused(folders, plans):
    plan = plans["gpt2", torch.float32].model_copy(update={"budget_bytes": 1 << 20, "smallest_budget_bytes": 300 << 20})
    with pytest.raises(InputError, match=r"a budget of 1.0 MiB cannot hold .* give --budget 300MiB or more"):
        placed_model(folders["gpt2", torch.float32], plan).__enter__()


def test_a_plan_of_another_model_is_refused(folders, plans, tmp_path):
    wider = saved(tmp_path / "wider", "gpt2", n_embd=96)
    plan = plans["gpt2", torch.float32]
    with pytest.raises(InputError, match=r"the plan is for another model: its part transformer.h.0 has 1\d+.\d KiB"):
        placed_model(wider, plan).__enter__()
    shorter = plan.model_copy(update={"parts": plan.parts[:-1]})
    with pytest.raises(InputError, match=r"another model: it has 6 parts, but this one has 7"):
        placed_model(folders["gpt2", torch.float32], shorter).__enter__()


def test_a_head_that_the_checkpoint_lacks_is_not_drawn(folders, plans, tmp_path):
    """A head with new random weights would give results that look like any others."""
    plan, folder = plans["bert", torch.float32], tmp_path / "m"
    shutil.copytree(folders["bert", torch.float32], folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith("classifier")}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(JobError, match=r"lacks weights \(classifier.bias, classifier.weight\)"):
        placed_model(folder, plan).__enter__()
    with pytest.raises(JobError, match=r"lacks weights \(classifier"):
        plan_inference(folder, "classify", longest_tokens=20, most_rows=2, device="cpu")


def test_the_remedy_for_a_budget_is_not_rounded_down(folders, plans):
    changes = {"budget_bytes": 1 << 20, "smallest_budget_bytes": (342 << 20) + 500_000}
    with pytest.raises(InputError, match="give --budget 343MiB or more"):
        placed_model(
            folders["gpt2", torch.float32], plans["gpt2", torch.float32].model_copy(update=changes)
        ).__enter__()


def test_it_is_the_device_that_was_asked_for(folders, plans):
    folder, plan = folders["gpt2", torch.float32], plans["gpt2", torch.float32]
    with pytest.raises(DeviceError, match="the plan is for cpu, but the device is cuda:1: make it again"):
        placed_model(folder, plan, device="cuda:1").__enter__()
    on_gpu = plan.model_copy(update={"device_kind": "cuda"})
    with pytest.raises(DeviceError, match="cannot use cuda:99"):
        placed_model(folder, on_gpu, device="cuda:99").__enter__()
