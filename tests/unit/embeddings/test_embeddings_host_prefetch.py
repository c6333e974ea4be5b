"""Rows are read ahead, and nothing else changes: batches, order, errors, and no thread is left."""

import threading

import pytest
import torch

from plimsoll.embeddings import host_prefetch
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.errors import InputError


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("plimsoll-rows")]


def read_ahead(num_batches, ahead, taken, stop_after=None):
    """Which batches had been asked of the loader when each was yielded."""
    given, seen = [], []

    def loader():
        for number in range(num_batches):
            given.append(number)
            yield number

    for batch in host_prefetch.prefetched(loader(), taken.append, ahead):
        seen.append((batch, len(given)))
        if len(seen) == stop_after:
            break
    return seen


def test_so_many_batches_are_read_ahead():
    taken = []
    assert read_ahead(4, 1, taken) == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert taken == [0, 1, 2, 3]
    assert read_ahead(4, 3, []) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert read_ahead(2, 5, []) == [(0, 2), (1, 2)]
    assert read_ahead(0, 1, []) == []
    assert threads() == []


def test_the_thread_ends_when_the_loop_is_left():
    assert read_ahead(9, 2, [], stop_after=2) == [(0, 3), (1, 4)]
    assert threads() == []


def test_the_thread_ends_when_a_step_fails():
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in host_prefetch.prefetched(range(5), lambda batch: None, 1)]
    assert threads() == []


def test_errors_of_the_loader_and_of_the_reading_arrive():
    def loader():
        yield 1
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        list(host_prefetch.prefetched(loader(), lambda batch: None, 1))
    with pytest.raises(ZeroDivisionError):
        list(host_prefetch.prefetched([1, 0], lambda batch: 1 / batch, 1))
    assert threads() == []


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("width", [1, 3, 1500])  # a row of 1500 float32 is on two or three pages
def test_reading_changes_nothing(is_mapped, width, tmp_path):
    table = HostEmbedding(700, width, path=tmp_path / "table" if is_mapped else None)
    before = table.weight.detach().clone()
    batches = [{"input_ids": torch.randint(0, 700, shape)} for shape in [(3, 4), (0,), (1,), (9,)]]
    fed = list(table.prefetched(batches, ids=lambda batch: batch["input_ids"]))
    assert all(one is other for one, other in zip(fed, batches, strict=True))
    assert torch.equal(table.weight, before)


def test_an_update_between_reading_and_looking_up_is_seen(tmp_path):
    table = HostEmbedding(10, 2, path=tmp_path / "table")
    for number, ids in enumerate(table.prefetched([torch.tensor([4])] * 3, ids=lambda ids: ids)):
        assert number == 0 or table(ids).tolist() == [[number, number]]
        with torch.no_grad():
            table.weight[4] = number + 1


def test_every_page_of_the_rows_is_asked_for_once(monkeypatch):
    """Rows of 1024 bytes from address 0: four on each page of 4096; rows 0 to 5 are on pages 0 and 1, row 40 on 10."""
    asked = []

    class Library:
        def madvise(self, address, length, advice):
            asked.append((address.value or 0, length.value))

    class Weight:
        shape, element_size, data_ptr, is_contiguous = (100, 256), lambda _: 4, lambda _: 0, lambda _: True

    monkeypatch.setattr(host_prefetch, "_C_LIBRARY", Library())
    monkeypatch.setattr(host_prefetch, "_PAGE_BYTES", 4096)
    host_prefetch._ask_for(Weight(), torch.tensor([0, 1, 5, 40, 60, 61]))
    assert asked == [(0, 8192), (40960, 4096), (61440, 4096)]
    asked.clear()
    host_prefetch._ask_for(Weight(), torch.tensor([], dtype=torch.int64))
    assert asked == []


def test_no_batches_ahead_are_refused():
    with pytest.raises(InputError, match="cannot read 0 batches ahead: give 1 or more"):
        HostEmbedding(3, 2).prefetched([], ids=id, ahead=0)


def test_ids_outside_of_the_table_are_refused_before_their_batch():
    table = HostEmbedding(3, 2)
    batches = table.prefetched([torch.tensor([0]), torch.tensor([3])], ids=lambda ids: ids)
    assert next(batches).tolist() == [0]
    with pytest.raises(IndexError, match="a table of 3 rows"):
        next(batches)
