"""A batch embedded in slices: loss, gradients and weights equal plain PyTorch with the whole batch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from embedders import CASES, NUM_SAMPLES, Encoder, batches, fresh, tied
from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import dry_run_step
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.micro_batches import autocast
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, conflict_among, installed, technique_of
from plimsoll.techniques.gradient_cache import gradient_cache_choice, gradient_cache_fallbacks
from workloads import largest_relative_difference, weights_of

NUM_STEPS = 3
every_case = pytest.mark.parametrize("name", CASES)


def workload_of(name, **options):
    case = CASES[name]
    model = fresh(case, **options)
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), case.loss, "samples")


def gradients_of(workload, batch):
    torch.manual_seed(1)
    with autocast(workload):
        loss = workload.loss(workload.model, batch)
    loss.backward()
    return loss.item(), {
        name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in workload.model.named_parameters()
    }


@every_case
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_loss_and_gradients_are_those_of_the_whole_batch(name, samples):
    batch = batches(1)[0]
    plain, gradients = gradients_of(workload_of(name), batch)
    workload = workload_of(name)
    with installed(workload, [gradient_cache_choice(samples)]):
        found, in_slices = gradients_of(workload, batch)
    assert found == pytest.approx(plain, rel=1e-6)
    assert largest_relative_difference(gradients, in_slices) < 1e-5


@every_case
def test_several_steps_are_those_of_plain_pytorch(name):
    plain = workload_of(name)
    losses = []
    for batch in batches(NUM_STEPS):
        plain.optimizer.zero_grad()
        loss = plain.loss(plain.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.optimizer.step()
        losses.append(loss.item())
    workload = workload_of(name)
    step = TrainStep(
        workload.model, workload.optimizer, workload.loss, units="samples", clip_norm=1.0,
        fallbacks=gradient_cache_fallbacks(NUM_SAMPLES, 4),
    )  # fmt: skip
    assert [step(batch).loss for batch in batches(NUM_STEPS)] == pytest.approx(losses, rel=1e-6)
    step.close()
    after = weights_of(workload.model, workload.optimizer)
    assert largest_relative_difference(weights_of(plain.model, plain.optimizer), after) < 1e-5


@every_case
def test_dropout_is_drawn_once(name):
    """The results equal plain PyTorch with a graph of all slices: the second pass draws the same numbers again."""
    batch = batches(1)[0]
    workload = workload_of(name, dropout=0.3)
    with installed(workload, [gradient_cache_choice(4)]):
        found, in_slices = gradients_of(workload, batch)
        drawn = torch.rand(1)
    plain = workload_of(name, dropout=0.3)
    with in_slices_with_a_graph(plain.model, 4):
        expected, gradients = gradients_of(plain, batch)
    assert found == pytest.approx(expected, rel=1e-6)
    assert largest_relative_difference(gradients, in_slices) < 1e-5
    assert torch.equal(torch.rand(1), drawn), "backward leaves the generator where forward left it"


class in_slices_with_a_graph:
    """A context in which embedding modules run on a few rows at a time, and all graphs stay."""

    def __init__(self, model, num_rows):
        self.parts = [one for one in model.modules() if isinstance(one, (Encoder, CASES["dicts"].build))]
        self.parts = self.parts or [model.bert]
        if isinstance(model, CASES["dicts"].build):
            self.parts = [model]
        self.num_rows = num_rows

    def __enter__(self):
        for part in self.parts:
            vars(part)["forward"] = self._forward(part, part.forward)

    def __exit__(self, *_):
        for part in self.parts:
            del vars(part)["forward"]

    def _forward(self, part, forward):
        def called(*args, **kwargs):
            given = [*args, *kwargs.values()]
            cut = [
                {key: one.split(self.num_rows) if key == "ids" else one for key, one in value.items()}
                if isinstance(value, dict) else value.split(self.num_rows)
                for value in given
            ]  # fmt: skip
            if isinstance(cut[0], dict):
                found = [forward({**cut[0], "ids": ids}) for ids in cut[0]["ids"]]
                return {"embedding": torch.cat([one["embedding"] for one in found])}
            if not kwargs:
                return torch.cat([forward(*slices) for slices in zip(*cut, strict=True)])
            found = [forward(**dict(zip(kwargs, slices, strict=True))) for slices in zip(*cut, strict=True)]
            for key in ("last_hidden_state", "pooler_output"):
                found[0][key] = torch.cat([one[key] for one in found])
            return found[0]

        return called


@pytest.mark.parametrize("name", ["one encoder, two calls", "transformers"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast(name, precision):
    batch = batches(1)[0]
    plain, workload = workload_of(name), workload_of(name)
    plain.precision = workload.precision = precision
    expected, gradients = gradients_of(plain, batch)
    with installed(workload, [gradient_cache_choice(3)]):
        found, in_slices = gradients_of(workload, batch)
    assert found == pytest.approx(expected, rel=2e-2)
    apart = sum((gradients[key] - in_slices[key]).double().square().sum() for key in gradients)
    assert float(apart / sum(one.double().square().sum() for one in gradients.values())) ** 0.5 < 5e-2


def test_fp16_with_a_scaler_is_that_of_plain_pytorch():
    losses = []
    for fallbacks in (None, gradient_cache_fallbacks(NUM_SAMPLES, 4)):
        workload = workload_of("one encoder, two calls")
        step = TrainStep(
            workload.model, workload.optimizer, workload.loss, units="samples", fallbacks=fallbacks, precision="fp16"
        )
        losses.append([step(batch).loss for batch in batches(NUM_STEPS)])
        step.close()
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_evaluation_is_in_slices_too():
    workload, batch = workload_of("one encoder, two calls"), batches(1)[0]
    seen = []
    workload.model.embedding.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    with torch.no_grad():
        expected = workload.loss(workload.model.eval(), batch)
        with installed(workload, [gradient_cache_choice(4)]):
            found = workload.loss(workload.model, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert seen[-6:] == [4, 4, 2, 4, 4, 2]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_is_predicted_falls_with_the_slices_and_is_traced_in_a_few_of_them():
    """A quarter of the rows needs little more than a quarter of the activations. 32 slices make the trace no longer."""
    model = fresh(CASES["one encoder, two calls"])
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), batches(1, num_samples=128, length=40)[0]
    peaks, ops = {}, {}
    for samples in (128, 32, 4):
        choices = (micro_batch_choice(128), gradient_cache_choice(samples))
        trace = dry_run_step(
            model, optimizer, batch, tied, CpuLowering(), units="samples", choices=choices, clip_norm=None,
            precision="fp32", is_short=True,
        )  # fmt: skip
        peaks[samples] = live_bytes(trace).peak_bytes
        last = [row for row, step in enumerate(trace.ops.step) if step == 2]
        ops[samples] = sum(trace.texts[trace.ops.name[row]].startswith("aten.addmm") for row in last)
    assert peaks[4] < peaks[32] < peaks[128] / 2
    assert ops[4] == 8 * ops[32], "32 slices, or 4, of which two and the last are dry-run"


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_memory_that_runs_out_is_followed_by_smaller_slices(phase):
    workload = workload_of("one encoder, two calls")
    expected, _ = gradients_of(workload_of("one encoder, two calls"), batches(1)[0])
    step = TrainStep(
        workload.model,
        workload.optimizer,
        workload.loss,
        units="samples",
        fallbacks=gradient_cache_fallbacks(NUM_SAMPLES, 4),
    )
    with armed(phase, 1, 2):
        result = step(batches(1)[0])
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.micro_batch == NUM_SAMPLES
    if phase != "optimizer":
        assert [event.action for event in result.oom_events] == [
            "same micro-batch with gradient_cache=2", "same micro-batch with gradient_cache=1"
        ]  # fmt: skip
    step.close()


# -- what it is offered for --------------------------------------------------------------------------------------------


def test_the_choices_are_weakest_first():
    workload = workload_of("one encoder, two calls")
    available = technique_of("gradient_cache").choices(workload, Setting("cpu", 64))
    assert available == tuple(map(gradient_cache_choice, (16, 4, 1)))
    assert [choices[1] for choices in gradient_cache_fallbacks(64, 5)] == [*map(gradient_cache_choice, (5, 3, 2, 1))]


def reason_of(model, batch_size=8, loss=tied):
    workload = Workload(model, torch.optim.SGD(model.parameters()), loss, "samples")
    return technique_of("gradient_cache").choices(workload, Setting("cpu", batch_size))


def test_why_nothing_applies():
    assert reason_of(Encoder(), batch_size=1) == "a batch of one sample cannot be sliced"
    assert (
        reason_of(nn.Sequential(Encoder(), nn.BatchNorm1d(8)))
        == "BatchNorm would compute its statistics from one slice"
    )
    assert "compiled" in reason_of(torch.compile(Encoder(), backend="eager"))
    assert "no module that could embed" in reason_of(nn.Linear(3, 3))
    counting = nn.Sequential(nn.Embedding(9, 3, scale_grad_by_freq=True), nn.Linear(3, 3))
    assert "scale_grad_by_freq" in reason_of(counting)


def test_the_model_itself_embeds_but_where_it_returns_its_loss():
    """In a user's own loop the loss is unknown, so the arguments of the model decide."""
    for build, embeds in ((Encoder, True), (Classified, False)):
        model = build()
        workload = Workload(model, torch.optim.SGD(model.parameters()), model_loss, "samples")
        with installed(workload, [gradient_cache_choice(5)]):
            assert ("forward" in vars(model)) == embeds
            assert "forward" in vars(model.body)


class Classified(Encoder):
    """A model that returns a loss."""

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(super().forward(ids), labels)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (micro_batch_choice(4), "micro-batches of 4 of 8 samples cut the batch already"),
        (Choice(technique="by_length"), "by_length cuts the batch"),
        (Choice(technique="optimizer_in_backward"), "complete only after the last one"),
        (Choice(technique="layer_streaming", options={"blocks": "all"}), "again for each slice"),
    ],
)
def test_what_it_does_not_go_with(other, reason):
    workload = workload_of("one encoder, two calls")
    technique, choice = technique_of("gradient_cache"), gradient_cache_choice(2)
    assert reason in technique.conflicts(choice, (other,), workload, Setting("cpu", 8))
    assert technique.conflicts(choice, (micro_batch_choice(8),), workload, Setting("cpu", 8)) is None


def test_options_that_cannot_be():
    workload, setting = workload_of("two towers"), Setting("cpu", 8)
    assert "a slice of 0 samples" in conflict_among((gradient_cache_choice(0),), workload, setting)
    named = Choice(technique="gradient_cache", options={"samples": 2, "part": "querry"})
    assert conflict_among((named,), workload, setting).endswith("the model has no part `querry`")
    with pytest.raises(InputError, match=r"no part `querry`; leave .*out"), installed(workload, [named]):
        pass


def test_a_part_can_be_named():
    workload, batch = workload_of("two towers"), batches(1)[0]
    seen = {"query": [], "passage": []}
    for name, sizes in seen.items():
        encoder = workload.model.get_submodule(name)
        encoder.embedding.register_forward_hook(lambda module, args, output, sizes=sizes: sizes.append(len(args[0])))
    named = Choice(technique="gradient_cache", options={"samples": 5, "part": "query"})
    with installed(workload, [named]):
        workload.loss(workload.model, batch)
    assert (seen["query"][-2:], seen["passage"]) == ([5, 5], [10])


def test_it_says_that_it_saved_nothing():
    """The warning comes for a model that returns similarities, but not if all rows fit in one slice."""
    workload = workload_of("similarities")
    named = Choice(technique="gradient_cache", options={"samples": 4, "part": ""})
    with (
        pytest.warns(UserWarning, match="saved nothing: no module of Towers returns one row"),
        installed(workload, [named]),
    ):
        workload.loss(workload.model, batches(1)[0])
    with warnings.catch_warnings(), installed(workload, [named]):
        warnings.simplefilter("error")
        workload.loss(workload.model, batches(1, num_samples=3)[0])


def test_a_copy_of_an_installed_model_runs_itself():
    workload, batch = workload_of("one encoder, two calls"), batches(1)[0]
    with installed(workload, [gradient_cache_choice(4)]):
        other = copy.deepcopy(workload.model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        assert workload.loss(other, batch).item() != pytest.approx(workload.loss(workload.model, batch).item())
