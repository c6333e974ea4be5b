"""The check that rows are computed independently: even slight mixing is found, and independent rows pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from embedders import CASES, WIDTH, batches
from plimsoll.errors import InputError
from plimsoll.techniques.mechanisms.row_by_row import computes_rows_alone
from plimsoll.techniques.mechanisms.rows import Arguments

SHARE = 1e-3


class Mixed(nn.Module):
    """Two layers on rows of numbers, followed by a function that may mix the rows."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mix

    def forward(self, rows):
        return self.mix(self.second(self.first(rows).tanh()))


def told(mix, rows=None):
    torch.manual_seed(0)
    module = Mixed(mix)
    rows = torch.randn(9, WIDTH) if rows is None else rows
    return computes_rows_alone("encoder", module, module.forward, Arguments((rows,), {}))


ALONE = {
    "itself": lambda x: x,
    "its norm": lambda x: nn.functional.normalize(x, dim=-1),
    "its statistics": lambda x: nn.functional.layer_norm(x, (WIDTH,)),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "a coin for each": lambda x: x * torch.bernoulli(torch.full((len(x), 1), 0.5)),
    "infinities": lambda x: x.masked_fill(x < 0, -torch.inf),
    "nested": lambda x: {"one": x, "two": (x[:, 0], x > 0), "three": None, "four": 3},
}
MIXED = {
    "the mean": lambda x: x - SHARE * x.mean(0),
    "the largest": lambda x: x + SHARE * x.amax(0),
    "the spread": lambda x: x / (1 + SHARE * x.std()),
    "the neighbour": lambda x: x + SHARE * x.roll(1, 0),
    "attention over rows": lambda x: x + SHARE * (x @ x.T).softmax(-1) @ x,
    "how many there are": lambda x: x * (1 + SHARE * len(x)),
    "where it stands": lambda x: x + SHARE * torch.arange(len(x))[:, None],
    "in the gradient only": lambda x: x + x.mean(0) - x.mean(0).detach(),
    "in a flag": lambda x: (x, x >= x.amax(0)),
    "its order": lambda x: x.sort(0).values,
}
NO_ROWS = {
    "a loss": lambda x: x.sum(),
    "similarities": lambda x: x @ x.T,
    "rows and a loss": lambda x: (x, x.mean()),
    "pairs": lambda x: x.repeat(2, 1),
    "an object": lambda x: [x, object()],
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("mix", ALONE.values(), ids=list(ALONE))
def test_rows_alone(mix):
    assert told(mix) is True


@pytest.mark.parametrize("mix", MIXED.values(), ids=list(MIXED))
def test_rows_that_are_mixed_are_refused(mix):
    with pytest.raises(InputError, match=r"`encoder` does not compute each row by itself.*or leave gradient_cache out"):
        told(mix)


@pytest.mark.parametrize("mix", NO_ROWS.values(), ids=list(NO_ROWS))
def test_what_gives_no_rows(mix):
    assert told(mix) is False


def test_random_numbers_stay_where_they_were():
    torch.manual_seed(5)
    module, arguments = Mixed(ALONE["dropout"]), Arguments((torch.randn(4, WIDTH),), {})
    before = torch.get_rng_state()
    assert computes_rows_alone("encoder", module, module.forward, arguments)
    assert torch.equal(before, torch.get_rng_state())


def test_rows_that_are_all_the_same_tell_nothing():
    assert told(MIXED["the mean"], torch.ones(9, WIDTH)) is None
    rows = torch.ones(9, WIDTH)
    rows[6] = 2.0  # a row that differs is enough to find it
    with pytest.raises(InputError, match="2 rows together"):
        told(MIXED["the mean"], rows)


def test_an_error_says_what_was_called():
    def of_nine(x: Tensor) -> Tensor:
        return x.reshape(3, 3, WIDTH).flatten(0, 1)

    with pytest.raises(RuntimeError) as raised:
        told(of_nine)
    assert "gradient_cache called `encoder` with 4 of 9 rows" in raised.value.__notes__[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["one encoder, two calls", "transformers"])
def test_real_encoders_with_dropout(name, dropout):
    torch.manual_seed(0)
    model = CASES[name].build(dropout=dropout).train()
    encoder = model.bert if name == "transformers" else model
    arguments = Arguments((batches(1)[0]["query"],), {})
    assert computes_rows_alone("encoder", encoder, encoder.forward, arguments)


def test_autocast_does_not_hide_mixed_rows():
    with torch.autocast("cpu", torch.bfloat16):
        assert told(ALONE["its norm"])
        with pytest.raises(InputError, match="does not compute each row by itself"):
            told(MIXED["the mean"])
