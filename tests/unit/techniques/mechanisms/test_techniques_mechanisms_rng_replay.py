"""Random numbers and autocast are the same in a repeated computation."""

from __future__ import annotations

import torch

from plimsoll.techniques.mechanisms.rng_replay import Autocast, RandomNumbers


def test_random_numbers_come_again():
    before = RandomNumbers.now([torch.empty(0)])
    drawn = torch.rand(3)
    before.restore()
    assert torch.equal(torch.rand(3), drawn)
    with before.kept():
        torch.rand(7)
    assert torch.equal(torch.rand(3), drawn)
    RandomNumbers.none().restore()
    assert not torch.equal(torch.rand(3), drawn)


def test_autocast_comes_again():
    with torch.autocast("cpu", torch.float16):
        before = Autocast.now(torch.device("cpu"))
    assert not torch.is_autocast_enabled("cpu")
    with before.again():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_cache_enabled()
    with torch.autocast("cpu"), Autocast("cpu", False, torch.bfloat16).again():
        assert not torch.is_autocast_enabled("cpu")
