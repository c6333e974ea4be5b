"""Folding of alike passes: the trace equals the trace of running each pass, and passes that may differ are run."""

from functools import partial, wraps
from types import FunctionType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from folded_traces import all_run, written_out
from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.repeated import Stretch
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run.step import dry_run_job, dry_run_step
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.folding.passes import _Given, _known_leaf, passes_repeat
from plimsoll.techniques import TECHNIQUES, in_order
from technique_trainings import choices_of, setup_for

FORGETFUL = sorted(one.name for one in TECHNIQUES.values() if not one.keeps_state_between_passes)
LOWERINGS = {"cpu": CpuLowering(), "cuda": CudaLowering((8, 6))}
TRAININGS = ["gpt2", "recurrent", "tagger"]  # of code that is transformers' or ours
TEXTS = TextSketch(vocab_size=300, num_labels=None, end_id=0)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW_KEYS = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1}
ARCHITECTURES = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2},
    "llama": FEW_KEYS,
    "qwen2": FEW_KEYS,
    "gemma2": FEW_KEYS | {"head_dim": 8},
    "opt": SMALL | {"ffn_dim": 32, "word_embed_proj_dim": 16, "layerdrop": 0.5},
    "gpt_neox": SMALL | {"intermediate_size": 32},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mixtral": FEW_KEYS | {"num_local_experts": 2},
    "lstm": {"embedding_size": 16, "hidden_size": 16},
}


@pytest.fixture
def folds(monkeypatch):
    """Return a list with an entry for each folded pass."""
    noted, again = [], Stretch.again

    def counted(self, ended=(), renamed=None):
        noted.append(self)
        return again(self, ended, renamed)

    monkeypatch.setattr(Stretch, "again", counted)
    return noted


def job(**changes):
    fields = {"data": {"train": "nowhere.txt"}, "sequence_length": 16, "batch_size": 14, "optimizer": {"clip_norm": 1}}
    return Job.from_fields(fields | changes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", LOWERINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_trace_of_a_job_is_that_of_all_its_passes(architecture, target, folds, monkeypatch):
    """Three steps have two micro-batches and a smaller last one, with an evaluation between: three passes are run.

    In half precision four passes are run, because the gradient scaler creates its scale in the first one.
    """
    precision = "fp16" if architecture in ("gpt2", "lstm") else "fp32"
    monkeypatch.setattr(
        "plimsoll.device.cpu.lstm_kernels._runs_lstm", lambda dtype: True
    )  # as a processor with kernels
    one = job(
        model={"architecture": architecture, **ARCHITECTURES[architecture]}, precision=precision,
        data={"train": "nowhere.txt", "validation": 0.1}, evaluate_every=2,
    )  # fmt: skip
    trace = partial(dry_run_job, one, TEXTS, LOWERINGS[target], (micro_batch_choice(4),))
    all_run(monkeypatch, trace)  # a warm-up: the first trace imports modules and fills caches of torch
    folded = trace()
    assert len(folds) == (5 if precision == "fp16" else 6)
    assert written_out(folded) == written_out(all_run(monkeypatch, trace))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("name", FORGETFUL)
def test_the_trace_with_any_technique_is_that_of_all_its_passes(name, training, folds, monkeypatch):
    setup = setup_for(training, [name])
    case = setup.case
    model, optimizer = setup.fresh()
    micro_batch = micro_batch_choice(4)
    for choice in choices_of(name, training)[-1:]:
        choices = in_order({one.technique: one for one in (micro_batch, choice)}.values())
        options = {"units": case.units, "choices": choices, "clip_norm": 1.0, "precision": "fp32"}
        trace = partial(dry_run_step, model, optimizer, case.batches()[0], model_loss, LOWERINGS["cuda"], **options)
        all_run(monkeypatch, trace)  # a warm-up: the first trace may import modules, and fills caches of torch
        folded = trace()
        assert folds
        assert folded == all_run(monkeypatch, trace)


@pytest.mark.parametrize("name", sorted(set(TECHNIQUES) - set(FORGETFUL)))
def test_what_a_technique_may_keep_is_run_each_time(name):
    workload = setup_for("gpt2", ["micro_batch"]).workload()
    assert passes_repeat(workload, (micro_batch_choice(4),))
    assert not passes_repeat(workload, (micro_batch_choice(4), Choice(technique=name)))


def gpt2_traced(model_loss=model_loss, prepare=lambda model: None):
    setup = setup_for("gpt2", ["micro_batch"])
    model, optimizer = setup.fresh()
    prepare(model)
    options = {"units": setup.case.units, "choices": (micro_batch_choice(8),), "clip_norm": None, "precision": "fp32"}
    return dry_run_step(model, optimizer, setup.case.batches()[0], model_loss, CpuLowering(), **options)


def of_transformers(function):
    """Return the function as if it were defined in transformers, whose code is known."""
    names = {**function.__globals__, "__name__": "transformers.of_test"}
    return FunctionType(function.__code__, names, closure=function.__closure__)


def test_a_model_that_changes_from_pass_to_pass_is_run_each_time(folds):
    """If a pass changes an attribute of a module, the next pass may differ."""

    def count(model, args, output):
        model.num_passes += 1
        return output + torch.zeros_like(output) if model.num_passes == 3 else output

    def prepare(model):
        model.lm_head.num_passes = 0
        model.lm_head.register_forward_hook(of_transformers(count))

    traces = [gpt2_traced(prepare=one) for one in (prepare, lambda model: None)]
    num_zeros = [sum(trace.texts[name] == "aten.zeros_like.default" for name in trace.ops.name) for trace in traces]
    assert num_zeros[0] > num_zeros[1]
    assert len(folds) == 2  # of the model that does not count


def test_a_list_that_a_model_fills_is_seen(folds):
    def prepare(model):
        model.lm_head.seen = []
        noting = of_transformers(lambda module, args, output: module.seen.append(len(module.seen)))
        model.lm_head.register_forward_hook(noting)

    gpt2_traced(prepare=prepare)
    assert folds == []


def test_code_that_is_not_known_is_run_each_time(folds):
    class Own(torch.nn.Identity):
        pass

    def prepare(model):
        model.transformer.drop = Own()

    gpt2_traced(prepare=prepare)
    gpt2_traced(lambda model, batch: model_loss(model, batch))
    assert folds == []


def test_micro_batches_are_alike_whose_values_are_known_and_the_same():
    """Masks and lengths choose the operators, so two micro-batches of one shape may need different passes."""
    mask = torch.ones(2, 3, dtype=torch.int64)
    parameter = torch.nn.Parameter(torch.zeros(1))

    def given(leaf, is_share=True, without=()):
        return _Given([_known_leaf(leaf)], is_share, [*without])

    assert given(mask).is_like(given(mask.clone()))
    assert given("a name").is_like(given("a name"))
    for other in (
        given(mask.tril()), given(mask.int()), given(mask.T.contiguous()), given(1), given(mask, is_share=False),
        given(mask, without=[parameter]), _Given([], True, []),
    ):  # fmt: skip
        assert not given(mask).is_like(other)
    with FakeTensorMode() as mode:
        unknown = given(mode.from_tensor(mask))
    assert not unknown.is_like(unknown)


def _through(forward, *args):
    return forward(*args)


@pytest.mark.parametrize("place", ["hook", "backward hook", "forward", "class"])
def test_code_that_is_called_with_a_module_is_known_or_all_passes_are_run(place, folds, monkeypatch):
    """Folding cannot see state in a closure."""

    def prepare(model):
        head = model.lm_head
        match place:
            case "hook":
                head.register_forward_hook(lambda module, args, output: output)
            case "backward hook":
                head.register_full_backward_hook(lambda module, grad_input, grad_output: None)
            case "forward":
                head.forward = partial(wraps(head.forward)(_through), head.forward)
            case "class":
                own = type(head).forward
                monkeypatch.setattr(type(head), "forward", lambda self, *args: own(self, *args))

    gpt2_traced(prepare=prepare)
    assert folds == []
