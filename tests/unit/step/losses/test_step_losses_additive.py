"""The check that a loss is additive: losses that must not be cut are found, however they hide it.

That random losses are cut exactly or refused is tested in tests/numerics.
"""

import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.step.losses.additive import Additivity, loss_check_of
from plimsoll.step.oom_boundary import Position

functional = nn.functional
WEIGHT = torch.tensor([1.0, 20.0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(x))


def batch_of(num_samples=12):
    torch.manual_seed(0)
    lengths = torch.arange(num_samples) % 5 + 1
    return {
        "x": torch.randn(num_samples, 4),
        "label": (torch.arange(num_samples) % 4 == 0).long(),
        "mask": (torch.arange(5) < lengths[:, None]).float(),
    }


def cross_entropy(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["label"])


def by_mask(model, batch):
    each = model(batch["x"]).square().sum(1, keepdim=True) * batch["mask"]
    return each.sum() / batch["mask"].sum()


def checked(loss, units="samples", batch=None, model=None, **said):
    torch.manual_seed(1)
    model = model or Net()
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units)
    options = {"recut_loss": False, "never_cut": False, **said}
    return loss_check_of(workload, batch_of() if batch is None else batch, backend_for("cpu"), **options)


@pytest.mark.parametrize(
    ("loss", "units"),
    [
        (cross_entropy, "samples"),
        (by_mask, lambda batch: batch["mask"].sum()),
        (
            lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["label"], weight=WEIGHT),
            lambda batch: float(WEIGHT[batch["label"]].sum()),
        ),
    ],
    ids=["samples", "mask", "weights"],
)
def test_means_with_the_right_units_are_additive_with_dropout(loss, units):
    check = checked(loss, units)
    assert (check.verdict, check.num_samples) == ("additive", 12)
    assert check.difference < 1e-6
    assert check.gradient_difference < 4e-6


def plus(term, coefficient=1e-3):
    return lambda model, batch: cross_entropy(model, batch) + coefficient * term(model(batch["x"]), batch)


NOT_ADDITIVE = {
    "units": (by_mask, "samples"),
    "sum": (lambda model, batch: cross_entropy(model, batch) * len(batch["x"]), "samples"),
    "in-batch negatives": (
        lambda model, batch: functional.cross_entropy(
            model(batch["x"]) @ model(batch["x"]).T, torch.arange(len(batch["x"]))
        ),
        "samples",
    ),
    "variance": (plus(lambda scores, batch: scores.var(0).sum()), "samples"),
    "largest": (plus(lambda scores, batch: scores.max()), "samples"),
    "pairs of a label": (
        plus(lambda scores, batch: (batch["label"] == batch["label"][:, None]).float().mean() * scores.square().mean()),
        "samples",
    ),
    "temperature": (
        lambda model, batch: functional.cross_entropy(
            model(batch["x"]) / model(batch["x"]).std().detach(), batch["label"]
        ),
        "samples",
    ),
    "only in training": (
        lambda model, batch: cross_entropy(model, batch) + (model(batch["x"]).var() * 1e-3 if model.training else 0),
        "samples",
    ),
    "value without gradient": (plus(lambda scores, batch: scores.var().detach()), "samples"),
    "gradient without value": (plus(lambda scores, batch: scores.var() - scores.var().detach(), 1e-2), "samples"),
    "ratio": (lambda model, batch: cross_entropy(model, batch) / cross_entropy(model, batch).detach(), "samples"),
}


@pytest.mark.parametrize("name", NOT_ADDITIVE)
def test_what_is_not_additive_is_found(name):
    check = checked(*NOT_ADDITIVE[name])
    assert check.verdict == "not additive"
    assert "the loss of a batch is not the sum of the losses of its parts" in check.why
    assert all(word in check.remedy for word in ("units", "CachedMultipleNegativesRankingLoss", "never_cut=True"))


def test_class_weights_are_named_with_the_units_that_are_right_though_one_label_is_there():
    def loss(model, batch):
        return functional.cross_entropy(model(batch["x"]), batch["label"], weight=WEIGHT)

    check = checked(loss, batch=batch_of() | {"label": torch.zeros(12, dtype=torch.long)})
    assert check.verdict == "not additive"
    assert 'units=lambda batch: float(weight[batch["labels"]].sum())' in check.remedy


def test_a_loss_that_keeps_a_state_is_found():
    state = {"mean": 1.0}

    def loss(model, batch):
        found = cross_entropy(model, batch)
        state["mean"] = 0.9 * state["mean"] + 0.1 * float(found.detach())
        return found / state["mean"]

    assert checked(loss).verdict == "not additive"
    assert state == {"mean": 1.0}


class Kept:
    """An object that the check does not search."""


def test_a_state_that_nobody_sees_is_not_taken_for_rounding():
    kept = Kept()
    kept.of = Kept()
    kept.of.draws = torch.Generator().manual_seed(0)

    def loss(model, batch):
        noise = torch.randn(batch["x"].shape, generator=kept.of.draws)
        return model(batch["x"] + 0.1 * noise).square().mean()

    assert checked(loss).verdict == "not additive"


def predicting_well(term=0.0):
    """Return a loss, and a model whose errors are only a few thousand times the rounding of its predictions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    batch = batch_of()
    batch["y"] = (model(batch["x"]) + 1e-4 * torch.randn(12, 1)).detach()

    def loss(model, batch):
        each = (model(batch["x"]) - batch["y"]).square()
        return each.mean() + term * each.max()

    return {"loss": loss, "batch": batch, "model": model}


def test_where_errors_cancel_roundings_are_told_from_a_term_of_the_batch():
    exact = checked(**predicting_well())
    assert exact.difference > 1e-6
    assert exact.verdict == "additive"
    assert checked(**predicting_well(0.01)).verdict == "not additive"


def test_parameters_are_as_before_to_the_last_bit():
    case = predicting_well()
    before = [one.detach().clone() for one in case["model"].parameters()]
    checked(**case)
    assert all(torch.equal(*pair) for pair in zip(before, case["model"].parameters(), strict=True))


def test_negatives_that_are_drawn_cannot_be_shown():
    def loss(model, batch):
        negatives = torch.randn(len(batch["x"]), 2)
        return (model(batch["x"]) * negatives).sum(1).logsumexp(0)

    check = checked(loss)
    assert check.verdict == "not shown"
    assert "draws random numbers besides dropout" in check.why


def test_a_loss_of_0_shows_nothing():
    check = checked(lambda model, batch: functional.relu(model(batch["x"]) * 0).sum())
    assert check.verdict == "not shown"
    assert "is 0 with no gradient" in check.why


def test_what_the_user_says_is_not_computed():
    def fails(model, batch):
        raise AssertionError

    assert checked(fails, never_cut=True).verdict == "never cut"
    assert checked(fails, recut_loss=True).verdict == "allowed"
    assert checked(fails, model=Net().to("meta")).verdict == "not computed"
    with pytest.raises(InputError, match="leave one of the two out"):
        checked(fails, never_cut=True, recut_loss=True)


def test_an_error_of_the_loss_is_the_users():
    def fails(model, batch):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        checked(fails)


def test_a_batch_whose_first_dimension_is_time_is_said_not_to_be_cut_though_it_is_square():
    def last_of_time(model, batch):
        return functional.cross_entropy(model(batch["x"].sum(0)), batch["label"])

    check = checked(last_of_time, batch={"x": torch.randn(12, 12, 4), "label": torch.arange(12) % 2})
    assert check.verdict == "not shown"
    assert "the loss cannot be computed for a few samples of a batch (ValueError: Expected" in check.why
    assert "put the samples in dimension 0 of every field" in check.remedy


def test_where_memory_runs_out_fewer_samples_are_taken_then_no_gradients():
    def fitting(most_rows, most_with_graph):
        def loss(model, batch):
            rows = len(batch["x"])
            if rows > (most_with_graph if torch.is_grad_enabled() else most_rows):
                raise MemoryError
            return cross_entropy(model, batch)

        return checked(loss)

    fewer, values, none = fitting(8, 4), fitting(2, 1), fitting(1, 1)
    assert (fewer.num_samples, fewer.verdict, fewer.gradient_difference is None) == (4, "additive", False)
    assert (values.num_samples, values.verdict, values.gradient_difference) == (2, "additive", None)
    assert none.verdict == "not shown"
    assert "memory ran out while the loss of two samples was computed" in none.why


def test_half_precision_is_compared_as_coarsely_as_it_computes():
    def loss(model, batch):
        return functional.cross_entropy(model(batch["x"].bfloat16()).float(), batch["label"])

    assert checked(loss, model=Net().bfloat16()).verdict == "additive"
    varied = checked(lambda m, b: loss(m, b) + m(b["x"].bfloat16()).float().var(), model=Net().bfloat16())
    assert varied.verdict == "not additive"


def test_a_loss_that_fails_for_one_sample_is_compared_in_larger_parts():
    def of_more_than_one(term):
        def loss(model, batch):
            if len(batch["x"]) == 1:
                raise IndexError
            return cross_entropy(model, batch) + term(model(batch["x"]))

        return loss

    assert checked(of_more_than_one(lambda scores: 0)).verdict == "additive"
    assert checked(of_more_than_one(lambda scores: scores.var())).verdict == "not additive"


def asked(additivity, batches):
    """Return how often the loss is checked for each batch."""
    counts = []
    for batch in batches:
        before = additivity._num_checks
        additivity.before_cut(batch)
        counts.append(additivity._num_checks - before)
    return counts


def test_it_is_asked_again_for_another_kind_of_batch_and_ever_more_rarely():
    model = Net()
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, "samples")
    additivity = Additivity(workload, backend_for("cpu"), Position(), recut_loss=False, never_cut=False)
    same = batch_of()
    unseen_label = same | {"label": torch.where(same["label"] == 1, 1, 0).index_fill(0, torch.tensor([3]), 1)}
    assert asked(additivity, [same] * 9) == [1, 1, 0, 1, 0, 0, 0, 1, 0]
    assert asked(additivity, [unseen_label]) == [0]
    assert asked(additivity, [same | {"more": torch.ones(12)}]) == [1]


def test_numbers_of_samples_do_not_make_every_batch_another_kind():
    model = Net()
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, "samples")
    additivity = Additivity(workload, backend_for("cpu"), Position(), recut_loss=False, never_cut=False)
    counts = asked(additivity, [batch_of() | {"number": torch.arange(12) + 12 * step} for step in range(40)])
    assert sum(counts[8:]) == 2  # the 16th and the 32nd


def test_what_is_found_later_says_since_when():
    model, is_late = Net(), [False]

    def loss(model, batch):
        return cross_entropy(model, batch) + (model(batch["x"]).var() if is_late[0] else 0)

    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, "samples")
    additivity = Additivity(workload, backend_for("cpu"), Position(), recut_loss=False, never_cut=False)
    assert additivity.before_cut(batch_of()) is None
    is_late[0] = True
    reason = additivity.before_cut(batch_of())
    assert reason is not None
    assert reason.why.endswith("found at cut 2, earlier cuts looked additive")
    assert workload.kept_whole == reason
    assert additivity.news().verdict == "not additive"
    assert additivity.news() is None


def test_nothing_of_a_check_stays():
    model = Net()
    calls, gradients = [], []
    model.head.weight.register_hook(gradients.append)

    def loss(model, batch):
        calls.append(1)
        return cross_entropy(model, batch)

    state = torch.get_rng_state()
    assert checked(loss, model=model).verdict == "additive"
    torch.manual_seed(1)
    torch.set_rng_state(state)
    assert (calls, gradients) == ([], [])
    assert all(one.grad is None for one in model.parameters())
    assert all(module.training for module in model.modules())
