import pytest
import torch
from torch import nn
from torch.nn import functional

from plimsoll.step.losses.without_dropout import undropped

X = torch.linspace(-1, 1, 48).view(2, 3, 8)


class Functions(nn.Module):
    def forward(self, x):
        x = functional.dropout(x, 0.5, self.training)
        return functional.scaled_dot_product_attention(x, x, x, None, 0.5 if self.training else 0.0, is_causal=True)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.AlphaDropout(0.5)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True),
        Functions(),
    ],
    ids=["modules", "attention", "recurrent", "functions"],
)
def test_a_model_that_trains_computes_what_it_does_in_evaluation(model):
    state = torch.get_rng_state()
    with undropped(model):
        found = model(X)
        assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first(model(X)), first(found)), "it drops again"
    with torch.no_grad():
        torch.testing.assert_close(first(found), first(model.eval()(X)))


def first(found):
    return found[0] if isinstance(found, tuple) else found


def test_running_statistics_are_used_and_stay():
    model = nn.BatchNorm1d(3)
    with undropped(model):
        torch.testing.assert_close(model(X), X / (1 + 1e-5) ** 0.5)
    assert (model.training, int(model.num_batches_tracked)) == (True, 0)


def test_a_single_number_is_drawn_as_if_it_had_not_been_and_others_are_noticed():
    state = torch.get_rng_state()
    with undropped(nn.Identity()):
        torch.rand([])
        assert torch.equal(state, torch.get_rng_state())
        torch.rand(2)
        assert not torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("weight", "reduction", "noticed"),
    [(None, "mean", False), ([1.0, 2.0], "mean", True), ([2.0, 2.0], "mean", False), ([1.0, 2.0], "sum", False)],
)
def test_a_mean_over_weights_of_labels_is_noticed(weight, reduction, noticed):
    weight = None if weight is None else torch.tensor(weight)
    with undropped(nn.Identity()) as mode:
        functional.cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 1]), weight, reduction=reduction)
    assert mode.averages_weights is noticed


def test_the_precision_of_autocast_is_noticed():
    with undropped(nn.Identity()) as mode, torch.autocast("cpu", torch.bfloat16):
        functional.linear(X, torch.ones(1, 8))
    assert mode.dtypes == {torch.bfloat16}
