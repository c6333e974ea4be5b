"""Predictions in a program of one's own: a model that exists, and a function that trains."""

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.errors import InputError

MIB = 1 << 20


def train():
    model = nn.Linear(512, 512).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        batch = torch.ones(64, 512).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_output(model, batch):
    return model(batch).mean()


def test_a_model_on_the_meta_device_needs_no_memory_and_is_counted_whole():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(16)])  # 4 GiB
    optimizer = torch.optim.SGD(model.parameters())
    prediction = plimsoll.predict(
        model, optimizer, torch.ones(4, 8192), mean_output, units="samples", device="a100-40gb"
    )
    assert prediction.parts["parameters"] == 16 * 8192 * 8192 * 4
    assert prediction.parts["gradients"] == 16 * 8192 * 8192 * 4
    assert prediction.fits
    assert not plimsoll.predict(
        model, optimizer, torch.ones(4, 8192), mean_output, units="samples", device="rtx4060"
    ).fits


def test_parts_add_up_to_the_peak_which_lies_in_its_range():
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    for device in ("cpu", "t4"):
        prediction = plimsoll.predict(
            model, torch.optim.AdamW(model.parameters()), torch.ones(32, 256), mean_output, units="samples",
            device=device,
        )  # fmt: skip
        assert sum(prediction.parts.values()) == prediction.peak.likely_bytes
        assert prediction.peak.low_bytes <= prediction.peak.likely_bytes <= prediction.peak.high_bytes
        assert prediction.device_kind == ("cpu" if device == "cpu" else "cuda")
        known_how = prediction.peak.model_dump()
        assert sum(known_how[f"{how}_bytes"] for how in ("traced", "measured", "modelled", "assumed")) == (
            prediction.peak.likely_bytes
        )


def test_a_function_is_run_as_it_is_for_a_gpu_that_is_not_here():
    prediction = plimsoll.predict_function(train, device="rtx3060")
    assert prediction.parts["parameters"] == 512 * 512 * 4 + 512 * 4
    assert prediction.subject == "train"
    assert not torch.is_autocast_enabled()


def test_a_function_without_an_update_is_refused():
    with pytest.raises(InputError, match=r"made \d+ ops but no optimizer.step\(\): let it train for three steps"):
        plimsoll.predict_function(lambda: nn.Linear(4, 4)(torch.ones(2, 4)), device="t4")


def test_a_negative_or_unreadable_budget_is_refused():
    for budget in ("-3GiB", "much", "0"):
        with pytest.raises(InputError, match="size"):
            plimsoll.predict_function(train, device="t4", budget=budget)
