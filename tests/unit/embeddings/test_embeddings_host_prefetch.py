"""Prefetching of rows changes nothing else: batches, order and errors are equal, and no thread is left."""

import ctypes
import mmap
import os
import threading

import pytest
import torch
from torch import nn

from plimsoll.embeddings import host, host_prefetch
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of
from plimsoll.errors import InputError


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("plimsoll-rows")]


def read_ahead(num_batches, ahead, taken, stop_after=None):
    """Return each batch with the number of batches requested from the loader when it was yielded."""
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
@pytest.mark.parametrize("width", [1, 3, 1500])  # a row of 1500 float32 lies on two or three pages
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


def test_every_page_of_the_rows_is_asked_for(monkeypatch):
    """Every page of the rows is requested.

    Rows have 1024 bytes, so four share a page of 4096 bytes.
    """
    asked = []

    def note(address, num_ranges):
        flat = (ctypes.c_int64 * (2 * num_ranges)).from_address(address)
        asked.append([(flat[place] - place_of_table, flat[place + 1]) for place in range(0, 2 * num_ranges, 2)])

    memory = mmap.mmap(-1, 100 * 1024)
    rows = torch.frombuffer(memory, dtype=torch.float32).view(100, 256)
    place_of_table = rows.data_ptr()
    monkeypatch.setattr(host_prefetch, "_advise", note)
    monkeypatch.setattr(host_prefetch, "_MOST_RANGES", 2)
    monkeypatch.setattr(host_prefetch, "_PAGE_BYTES", 4096)
    host_prefetch.read_rows([rows], torch.tensor([5, 0, 40, 5]))
    assert asked == [[(0, 4096), (4096, 4096)], [(40960, 4096)]]
    asked.clear()
    host_prefetch.read_rows([rows.view(50, 512)[:, :300].contiguous()[:0], rows], torch.tensor([], dtype=torch.int64))
    assert asked == []


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SparseAdam])
def test_states_are_read_as_well(kind, tmp_path, monkeypatch):
    table = HostEmbedding(10, 2, path=tmp_path / "table")
    optimizer = optimizer_of(table, kind, lr=0.1)
    read = []
    monkeypatch.setattr(host, "read_rows", lambda tables, ids: read.append(len(tables)))
    table.prefetch(torch.tensor([1]), optimizer)
    table.prefetch(torch.tensor([1]))
    assert read == [{torch.optim.Adagrad: 2, torch.optim.SparseAdam: 3}[kind], 1]


def test_pages_that_were_evicted_are_back(tmp_path):
    """Pages that were evicted are back in memory.

    mincore reports for each page whether it is in memory. If the kernel keeps all pages, the test shows nothing.
    """
    table = HostEmbedding(4096, 1024, path=tmp_path / "table", initialize=nn.init.zeros_)
    descriptor = os.open(tmp_path / "table", os.O_RDONLY)
    os.fsync(descriptor)
    library = ctypes.CDLL(None)
    address, num_bytes = ctypes.c_void_p(table.weight.data_ptr()), ctypes.c_size_t(table.weight.nbytes)
    # for a shared file, this drops the mapping's pages and loses no data
    library.madvise(address, num_bytes, mmap.MADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)

    def resident():
        pages = (ctypes.c_ubyte * 4096)()
        assert library.mincore(address, num_bytes, pages) == 0
        return [page & 1 for page in pages]

    if mmap.PAGESIZE != 4096 or sum(resident()) > 4000:
        pytest.skip("this file system keeps every page")
    ids = torch.tensor([7, 2000, 4095])
    table.prefetch(ids)
    assert [resident()[number] for number in ids] == [1, 1, 1]


def test_no_batches_ahead_are_refused():
    with pytest.raises(InputError, match="cannot read 0 batches ahead: give 1 or more"):
        HostEmbedding(3, 2).prefetched([], ids=id, ahead=0)


def test_ids_outside_of_the_table_are_refused_before_their_batch():
    table = HostEmbedding(3, 2)
    batches = table.prefetched([torch.tensor([0]), torch.tensor([3])], ids=lambda ids: ids)
    assert next(batches).tolist() == [0]
    with pytest.raises(IndexError, match="a table of 3 rows"):
        next(batches)
