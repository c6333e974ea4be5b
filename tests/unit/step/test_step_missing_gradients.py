"""Parameters that no gradient reaches are reported with the cause; parameters that only wait for one are not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll
from plimsoll.step.failpoints import armed


class Net(nn.Module):
    """Two blocks and a head on a frozen embedding; ``how`` runs the blocks."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 10)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = self.how(block, hidden)
        return self.head(hidden)


def reentrant(block: nn.Module, hidden: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, which names nothing
        return checkpoint(block, hidden, use_reentrant=True)  # type: ignore[no-any-return]


def without_grad(block: nn.Module, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return block(hidden)  # type: ignore[no-any-return]


def detached(block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden).detach()  # type: ignore[no-any-return]


def step_of(model: nn.Module, **options) -> plimsoll.TrainStep:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch), batch)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return plimsoll.TrainStep(model, torch.optim.SGD(trained, lr=0.1), loss, units="samples", **options)


BATCH = torch.arange(10)


@pytest.mark.parametrize(
    ("how", "num_steps", "cause"),
    [
        (reentrant, 1, "use_reentrant=True on inputs that require no gradient"),
        (without_grad, 1, r"run under torch.no_grad\(\)"),
        (detached, 5, "detached or unused"),
        (lambda block, hidden: hidden, 5, "not called"),
    ],
)
def test_what_gets_no_gradient_is_said_once_with_its_cause(how, num_steps, cause):
    step = step_of(Net(how))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(num_steps - 1):
            step(BATCH)
    names = r"4 of 6 trainable parameters .* up to step \d .*blocks.0.weight, blocks.0.bias, blocks.1.weight and 1 more"
    with pytest.warns(UserWarning, match=f"{names}.*{cause}") as said:
        step(BATCH)
    assert len(said) == 1
    (finding,) = plimsoll.explain(step).findings
    assert finding.title == "4 of 6 trainable parameters are not trained"
    assert re.search(names, finding.evidence[0].text)
    assert re.search(cause, finding.evidence[1].text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            step(BATCH)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_training_in_which_all_get_gradients_is_left_alone(micro_batch: int | None):
    model = Net(lambda block, hidden: checkpoint(block, hidden, use_reentrant=False))
    step = step_of(model, micro_batch=micro_batch)
    with warnings.catch_warnings(), armed("backward", 1):
        warnings.simplefilter("error")
        step(BATCH)
    assert plimsoll.explain(step).findings == ()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_branch_that_is_not_taken_yet_has_more_time_than_a_head_that_nothing_uses():
    """The case is an expert that has no tokens yet, while another expert has some."""
    taken = [0]

    class Experts(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks[taken[0]](self.embed(ids)))  # type: ignore[no-any-return]

    model = Experts(reentrant)
    step = step_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            step(BATCH)
        taken[0] = 1
        for _ in range(90):
            step(BATCH)
    taken[0], step = 0, step_of(model)
    with pytest.warns(UserWarning, match=r"2 of 6 .*up to step 100 .*blocks.1.weight, blocks.1.bias\)") as said:
        assert [step(BATCH).step for _ in range(110)][-1] == 110
    assert len(said) == 1
    (one,) = step.unreached.found
    assert (one.names, one.num_all, one.step) == (("blocks.1.weight", "blocks.1.bias"), 6, 100)


def test_what_a_compiled_model_does_not_reach_is_said_without_a_cause():
    model = torch.compile(Net(detached), backend="eager")
    step = step_of(model)
    with pytest.warns(UserWarning, match="4 of 6 .*: the loss does not depend on them"):
        assert [step(BATCH).step for _ in range(5)][-1] == 5
