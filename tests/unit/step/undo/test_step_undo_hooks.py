"""Hooks that a step adds or removes are restored; hooks that Plimsoll owns are not touched."""

import functools

import torch
from torch import nn

from plimsoll.step.undo.hooks import OF_MODULES, SavedHooks, containers_of


def doubled(_, inputs, output):
    return 2 * output


def test_hooks_are_as_they_were():
    layer, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    weight.register_hook(torch.clone)
    kept = layer.register_forward_hook(doubled)
    saved = SavedHooks(containers_of([layer]), [weight, layer.weight])
    kept.remove()
    layer.register_forward_hook(doubled, with_kwargs=True)
    layer.register_full_backward_pre_hook(print)
    weight.register_post_accumulate_grad_hook(print)
    layer.weight.register_hook(torch.neg)
    saved.restore()
    assert [*layer._forward_hooks.values()] == [doubled]
    others = [getattr(layer, name) for name in OF_MODULES - {"_forward_hooks"}]
    assert not any(hooks for hooks in others if isinstance(hooks, dict))
    assert torch.equal(layer(torch.zeros(1, 2)), 2 * layer.bias.expand(1, 2))
    weight.sum().backward()
    assert len(weight._backward_hooks) == 1
    assert not layer.weight._backward_hooks


def test_what_plimsoll_registers_stays():
    layer = nn.Linear(2, 2)
    saved = SavedHooks(containers_of([layer]), [])
    own = functools.partial(doubled)
    doubled.__module__, before = "plimsoll.step.any", doubled.__module__
    try:
        layer.register_forward_hook(own)
        saved.restore()
        assert [*layer._forward_hooks.values()] == [own]
    finally:
        doubled.__module__ = before
