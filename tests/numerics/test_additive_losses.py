"""Random losses, additive or not: a split step has the loss and update of the whole batch, or is refused.

Features that first appear in a later batch, or in few of its samples, are detected as well.

Each loss is a mean over samples, tokens, mask or class weights, with right or wrong units. Some have terms over the
whole batch: large, small, hidden from the value (detached) or hidden from the gradient.
"""

import random
from collections import Counter

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.step.train_step import TrainStep

functional = nn.functional
MOST_DIFFERENCE = 1e-5  # relative to the loss, and to the update


def cross_entropy(scores, batch):
    return functional.cross_entropy(scores, batch["labels"])


def weighted(scores, batch):
    return functional.cross_entropy(scores, batch["labels"], weight=WEIGHT)


def squares(scores, batch):
    return (scores - batch["x"][:, :3]).square().mean()


def masked(scores, batch):
    each = (scores - batch["x"][:, :3]).abs()
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def weighted_by_hand(scores, batch):
    each = functional.cross_entropy(scores, batch["labels"], reduction="none")
    weights = WEIGHT[batch["labels"]]
    return (each * weights).sum() / weights.sum()


def summed(scores, batch):
    return functional.cross_entropy(scores, batch["labels"], reduction="sum")


WEIGHT = torch.tensor([1.0, 3.0, 0.25])
OF_SAMPLES = "samples"
OF_MASK = lambda batch: float(batch["mask"].sum())  # noqa: E731
OF_WEIGHTS = lambda batch: float(WEIGHT[batch["labels"]].sum())  # noqa: E731
MEANS = {
    cross_entropy: OF_SAMPLES,
    squares: OF_SAMPLES,
    weighted: OF_WEIGHTS,
    weighted_by_hand: OF_WEIGHTS,
    masked: OF_MASK,
}
"""Losses, and the units that they are means over; a sum is not a mean over any."""

TERMS = {
    "variance": lambda scores, batch: scores.var(0, unbiased=False).sum(),
    "largest": lambda scores, batch: scores.max(),
    "balance": lambda scores, batch: scores.softmax(1).mean(0).square().sum(),
    "pairs": lambda scores, batch: functional.cross_entropy(scores @ scores.T, torch.arange(len(scores))),
    "one label": lambda scores, batch: (
        (torch.cdist(scores, scores) * (batch["labels"][:, None] == batch["labels"])).sum() / len(scores)
    ),
    "ratio": lambda scores, batch: (scores.square().mean() + 1) / (scores.square().mean() + 1).detach(),
    "hidden gradient": lambda scores, batch: scores.var() - scores.var().detach(),
    "hidden value": lambda scores, batch: scores.var().detach(),
    "temperature": lambda scores, batch: functional.cross_entropy(scores / scores.detach().std(), batch["labels"]),
    "sampled": lambda scores, batch: scores[torch.randint(len(scores), (1,))].sum(),
}
SAMPLE_TERMS = {
    "none": lambda scores, batch: 0.0,
    "square": lambda scores, batch: scores.square().mean(),
    "entropy": lambda scores, batch: torch.special.entr(scores.softmax(1)).sum(1).mean(),
    "detached": lambda scores, batch: (scores.detach().sigmoid() * scores).mean(),
}


def random_case(seed):
    """Return a loss, its units, and whether it is additive."""
    draw = random.Random(seed)
    mean = draw.choice([*MEANS, summed] if draw.random() < 0.1 else [*MEANS])
    right = MEANS.get(mean)
    is_right = right is not None and draw.random() < 0.8
    units = right if is_right else draw.choice([one for one in (OF_SAMPLES, OF_MASK) if one is not right])
    is_term_of_samples = draw.random() < 0.6
    name, term = draw.choice([*(SAMPLE_TERMS if is_term_of_samples else TERMS).items()])
    coefficient = 10 ** draw.uniform(-4, 0)
    is_additive = is_right and is_term_of_samples and (units is OF_SAMPLES or name == "none")

    def loss(model, batch):
        scores = model(batch["x"])
        return mean(scores, batch) + coefficient * term(scores, batch)

    return loss, units, is_additive, draw


def random_training(seed, num_samples):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.0), nn.Tanh(), nn.Linear(6, 3))
    batch = {
        "x": torch.randn(num_samples, 5),
        "labels": torch.randint(3, (num_samples,)),
        "mask": (torch.rand(num_samples, 3) < 0.6).float().index_fill(1, torch.tensor([0]), 1.0),
    }
    return model, batch


def outcome_of(seed):
    """Return the largest difference of a split step from the whole batch, or `None` if the split is refused."""
    loss, units, is_additive, draw = random_case(seed)
    num_samples = draw.randint(3, 14)
    model, batch = random_training(seed, num_samples)
    whole, state = loss(model, batch), torch.get_rng_state()
    parameters = [*model.parameters()]
    gradients = torch.cat([one.flatten() for one in torch.autograd.grad(whole, parameters)])
    before = [one.detach().clone() for one in parameters]
    step = TrainStep(
        model, torch.optim.SGD(parameters, lr=1.0), loss, units=units, micro_batch=draw.randint(1, num_samples - 1)
    )
    try:
        result = step(batch)
    except InputError:
        assert torch.equal(state, torch.get_rng_state())
        assert all(map(torch.equal, before, parameters))
        return is_additive, None
    update = torch.cat([(old - new.detach()).flatten() for old, new in zip(before, parameters, strict=True)])
    # Updated weights are rounded, relative to the size of the weights.
    rounding = torch.finfo(torch.float32).eps * float(torch.cat([one.flatten() for one in before]).norm())
    of_update = max(float((update - gradients).norm()) - rounding, 0.0) / float(gradients.norm())
    return is_additive, max(of_update, abs(result.loss - whole.item()) / abs(whole.item()))


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 1000), marks=pytest.mark.long)], ids=str)
def test_a_thousand_random_losses_are_cut_exactly_or_refused(seeds):
    outcomes = {seed: outcome_of(seed) for seed in seeds}
    silent = {seed: found for seed, (_, found) in outcomes.items() if found is not None and found > MOST_DIFFERENCE}
    refused = [seed for seed, (is_additive, found) in outcomes.items() if is_additive and found is None]
    counts = Counter((is_additive, found is None) for is_additive, found in outcomes.values())
    assert (silent, refused) == ({}, [])
    assert min(counts[True, False], counts[False, True]) > len(seeds) // 4, counts


def tagged(draw, draws, num_rare):
    """Return a batch of tags in which `num_rare` samples have a rare one."""
    tags = torch.randint(4, (NUM_SAMPLES, LENGTH), generator=draws)
    rare = torch.randperm(NUM_SAMPLES, generator=draws)[:num_rare]
    tags[rare, draw.randrange(LENGTH)] = 4
    return {"ids": torch.randint(9, 60, (NUM_SAMPLES, LENGTH), generator=draws), "labels": tags}


def padded(draw, draws, num_rare, padding, side):
    """Return a batch of texts in which `num_rare` samples are padded."""
    ids = torch.randint(9, 60, (NUM_SAMPLES, LENGTH), generator=draws)
    for row in torch.randperm(NUM_SAMPLES, generator=draws)[:num_rare].tolist():
        num_columns = draw.randint(3, LENGTH - 2)
        ids[row, slice(num_columns) if side == "left" else slice(-num_columns, None)] = padding
    return {"ids": ids}


NUM_SAMPLES, LENGTH = 24, 8
TAG_WEIGHTS = torch.tensor([1.0, 1, 1, 1, 20])


def of_tags(model, batch):
    each = functional.cross_entropy(
        model(batch["ids"])[..., :5].flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    weights = TAG_WEIGHTS[batch["labels"].flatten()]
    return (each * weights).sum() / weights.sum()


def later_case(seed):
    """Return a loss, its units and batches; one of the first four has a rare tag or padding in few samples."""
    draw, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    numbers_of_rare = [0] * draw.randrange(4) + [draw.randint(1, 4)] * 2
    if draw.random() < 0.5:
        return of_tags, "tokens", [tagged(draw, draws, number) for number in numbers_of_rare]
    padding, side = draw.choice([0, 1, 3, 5, 61]), draw.choice(["left", "right"])

    def of_tokens(model, batch):
        scores, targets = model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten()
        return functional.cross_entropy(scores, targets, ignore_index=padding)

    return of_tokens, "samples", [padded(draw, draws, number, padding, side) for number in numbers_of_rare]


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 400), marks=pytest.mark.long)], ids=str)
def test_what_comes_later_or_rarely_is_cut_exactly_or_refused(seeds):
    silent, num_refused = [], 0
    for seed in seeds:
        loss, units, batches = later_case(seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(62, 6), nn.Tanh(), nn.Linear(6, 62))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, units=units, micro_batch=6)
        for batch in batches:
            whole = loss(model, batch).item()
            try:
                found = step(batch).loss
            except InputError:
                num_refused += 1
                break
            silent += [seed] if abs(found - whole) > MOST_DIFFERENCE * whole else []
    assert silent == []
    assert num_refused > 0.8 * len(seeds)
