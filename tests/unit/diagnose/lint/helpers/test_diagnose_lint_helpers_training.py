"""The recognition of training and evaluation."""

import pytest

from plimsoll.diagnose.lint.helpers.source import last_name, parse, path_of
from plimsoll.diagnose.lint.helpers.training import (
    backwards,
    batch_loop,
    is_batch_loop,
    is_forward,
    is_without_grad,
    iterated,
    steps,
    zero_grads,
)


@pytest.mark.parametrize(
    ("code", "loss", "divides"),
    [
        ("loss.backward()", "loss", False),
        ("scaler.scale(loss).backward()", "loss", False),
        ("self.scaler.scale(a.loss).backward(retain_graph=True)", "a.loss", False),
        ("accelerator.backward(loss)", "loss", True),
        ("self.accelerator.backward(loss)", "loss", True),
        ("model_engine.backward(loss)", "loss", True),
        ("fabric.backward(loss)", "loss", False),
        ("self.manual_backward(loss)", "loss", False),
        ("with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()", "loss", False),
    ],
)
def test_every_kind_of_backward_pass_has_its_loss(code, loss, divides):
    (found,) = backwards(parse(code))
    assert (path_of(found.loss), found.divides) == (loss, divides)


def test_definitions_are_no_backward_passes():
    assert backwards(parse("class F:\n    def g(self):\n        self.backward()\n        super().backward()\n")) == []


def test_optimizers_are_known_by_class_or_name():
    source = parse(
        "o = torch.optim.SGD(p)\no.step()\nopt_g.step()\nscaler.step(o)\nscheduler.step()\noptim_scheduler.step()\n"
    )
    assert [step.lineno for step in steps(source)] == [2, 3, 4]
    assert (
        len(zero_grads(parse("optimizer.zero_grad()\nmodel.zero_grad()\nthing.zero_grad()"))) == 3
    )  # thing has gradients, too


@pytest.mark.parametrize(
    ("iterable", "name"),
    [
        ("loader", "loader"),
        ("enumerate(tqdm(train_loader, desc='x'), 1)", "train_loader"),
        ("self.loaders[phase]", "loaders"),
        ("data.batches(8)", "batches"),
        ("range(4)", "range"),
    ],
)
def test_what_a_loop_goes_over(iterable, name):
    source = parse(f"for a in {iterable}:\n    pass\nwhile True:\n    pass")
    assert iterated(source.tree.body[0]) == name
    assert iterated(source.tree.body[1]) == ""
    assert is_batch_loop(source, source.tree.body[0]) == (name != "range")


def test_a_loop_is_of_batches_for_its_backward_pass_also_through_a_function():
    source = parse("def step(x):\n    f(x).backward()\nfor i in range(3):\n    for x in xs:\n        step(x)\n")
    outer = source.tree.body[1]
    assert is_batch_loop(source, outer.body[0])
    assert not is_batch_loop(source, outer)
    assert batch_loop(source, backwards(source)[0].call) is outer.body[0]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("model(x)", True),
        ("self.encoder(x)", True),
        ("net.forward(x)", True),
        ("ddp_model.module(x)", True),
        ("tokenizer(x)", False),
        ("writer.generator(x)", False),
        ("model.generate(x)", False),
        ("optimizer(x)", False),
    ],
)
def test_forward_passes(call, expected):
    source = parse(call)
    assert is_forward(source, source.calls[0]) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("with torch.no_grad():\n    target()", True),
        ("with open(f), torch.inference_mode():\n    target()", True),
        ("with torch.inference_mode(False):\n    target()", False),
        ("with torch.set_grad_enabled(train):\n    target()", True),
        ("with torch.set_grad_enabled(True):\n    target()", False),
        ("with torch.enable_grad():\n    target()", False),
        ("torch.set_grad_enabled(False)\ntarget()", True),
        ("target()\ntorch.set_grad_enabled(False)", False),
        ("@torch.no_grad()\ndef f():\n    target()", True),
        ("@torch.inference_mode\ndef f():\n    target()", True),
        ("def f():\n    target()\nwith torch.no_grad():\n    f()", True),
        ("def f():\n    target()\nwith torch.no_grad():\n    f()\nf()", False),
        ("def f():\n    target()", False),
    ],
)
def test_where_gradients_are_off(code, expected):
    source = parse(code)
    target = next(call for call in source.calls if last_name(call.func) == "target")
    assert is_without_grad(source, target) == expected
