"""Small models for testing methods of the values stage, and their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints import model_of
from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
from plimsoll.records.plan import Choice

IDS = torch.arange(12).view(2, 6)


def choice_of(method: str, **options: Any) -> Choice:
    return Choice(technique=method, options=options)


def shrunk(method: str, model: Any, **options: Any) -> Any:
    bundle, choice = Bundle(model), choice_of(method, **options)
    assert SHRINKERS[method].refusal(bundle, choice) is None
    SHRINKERS[method].shrink(bundle, choice, Calibration())
    return bundle.model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def made(name: str, **fields: Any) -> Any:
    return model_of(name, **fields)
