"""A captured graph replays kernels, and frees its memory, even if the capture fails."""

from __future__ import annotations

import pytest
import torch

from plimsoll.device.cuda.graphs import CudaGraph, _told_of_no_capture

MIB = 1 << 20
on_gpu = pytest.mark.gpu


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_python_is_told_of_no_capture_while_one_is_under_way(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with _told_of_no_capture():
        assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing()


@on_gpu
def test_a_replay_computes_from_what_is_there_then_and_draws_as_an_eager_pass_does():
    graph, x = CudaGraph(cuda()), torch.ones(64, device="cuda")
    y = graph.capture(lambda: torch.nn.functional.dropout(x * 2, 0.5))
    for value in (1.0, 3.0):
        x.fill_(value)
        torch.cuda.manual_seed(int(value))
        graph.replay()
        after = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(int(value))
        assert torch.equal(y, torch.nn.functional.dropout(x * 2, 0.5))
        assert torch.equal(after, torch.cuda.get_rng_state())
    graph.release()


@on_gpu
def test_its_memory_is_reserved_until_it_is_released():
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    graph = CudaGraph(cuda())
    y = graph.capture(lambda: torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").sum())
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= before_bytes + 64 * MIB
    del y
    graph.release()
    assert torch.cuda.memory_reserved() <= before_bytes + 2 * MIB


@on_gpu
@pytest.mark.parametrize("what", ["waits", "raises"])
def test_a_capture_that_fails_leaves_everything_as_it_was(what):
    torch.cuda.empty_cache()
    before_bytes, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()

    def work():
        x = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        if what == "waits":
            torch.cuda.synchronize()
        else:
            raise RuntimeError("no")
        return x

    graph = CudaGraph(cuda())
    with pytest.raises(RuntimeError):
        graph.capture(work)
    graph.release()
    del graph
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.memory_reserved() <= before_bytes + 2 * MIB
    again = CudaGraph(cuda())
    y = again.capture(lambda: torch.ones(4, device="cuda") * 3)
    again.replay()
    assert y.tolist() == [3.0] * 4
    again.release()
