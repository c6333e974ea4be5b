"""Reading ahead, checked in the real page cache: only the following part is there before it computes."""

import sys
import threading

import pytest
import torch
from torch import nn

from page_cache import cached_share, mapped_weights
from plimsoll.device.cpu.pages import drop, stretches_of
from plimsoll.techniques.mechanisms.read_ahead import StreamedPart, reading_ahead

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the page cache is Linux's")

PAGES = 5


class Part(nn.Module):
    """A part that reads no weights, so that only pages that were read ahead are in the cache."""

    def forward(self, hidden):
        return hidden + 1


class Fails(Part):
    def forward(self, hidden):
        raise MemoryError


@pytest.fixture
def weights(tmp_path):
    return mapped_weights(tmp_path / "weights", (PAGES,) * 4)


def parts_of(weights, **changes):
    return [StreamedPart(Part(), stretches_of([weight]), **changes) for weight in weights]


def cached(weights):
    return [int(cached_share(stretches_of([weight]))) for weight in weights]


def test_each_part_finds_its_pages_and_the_last_asks_for_the_first(weights):
    parts, hidden = parts_of(weights), torch.zeros(1)
    with reading_ahead(parts) as reader:
        for part, expected in zip(parts, ([0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]), strict=True):
            hidden = part.module(hidden)
            reader.wait()
            assert cached(weights) == expected
    assert hidden == 4


def test_what_cannot_stay_goes_when_it_has_computed(weights):
    parts = parts_of(weights, is_dropped=True)
    with reading_ahead(parts) as reader:
        for part, expected in zip(parts, ([0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]), strict=True):
            part.module(torch.zeros(1))
            reader.wait()
            assert cached(weights) == expected


def test_what_follows_the_last_part_comes_with_it_and_goes_with_the_next_pass(weights):
    *blocks, output = weights
    parts = parts_of(blocks, is_dropped=True)
    parts[-1] = parts[-1]._replace(following=stretches_of([output]))
    with reading_ahead(parts) as reader:
        for part in parts:
            part.module(torch.zeros(1))
        reader.wait()
        assert cached(weights) == [1, 0, 0, 1]
        parts[0].module(torch.zeros(1))
        reader.wait()
        assert cached(weights) == [0, 1, 0, 0]


def test_one_part_alone_is_not_asked_for(weights):
    (part,) = parts_of(weights[:1])
    with reading_ahead([part]) as reader:
        part.module(torch.zeros(1))
        reader.wait()
    assert cached(weights) == [0, 0, 0, 0]


def test_nothing_is_left_behind(weights):
    parts = parts_of(weights)
    num_threads = threading.active_count()
    with reading_ahead(parts):
        assert threading.active_count() == num_threads + 1
    assert threading.active_count() == num_threads
    drop(stretches_of(weights))
    parts[0].module(torch.zeros(1))
    assert cached(weights) == [0, 0, 0, 0]


def test_a_pass_that_fails_leaves_a_reader_that_goes_on(weights):
    parts = parts_of(weights)
    parts[1] = parts[1]._replace(module=Fails())
    with reading_ahead(parts) as reader:
        parts[0].module(torch.zeros(1))
        with pytest.raises(MemoryError):
            parts[1].module(torch.zeros(1))
        parts[0].module(torch.zeros(1))
        reader.wait()
        assert cached(weights) == [0, 1, 1, 0]


def test_no_parts_are_no_error():
    with reading_ahead([]):
        pass
