"""Live bytes added up by hand: totals, categories, places, and the storages at the peak."""

from memory_traces import Storage, trace_of

from plimsoll.memory.live import live_bytes


def test_births_and_deaths_add_up_by_category():
    trace = trace_of(
        ["a", "b", "c"],
        [
            Storage(8, born=0, category="parameters"),
            Storage(16, born=0, died=1, category="activations"),
            Storage(4, born=1, died=2, category="temporaries"),
        ],
    )
    live = live_bytes(trace)
    assert live.delta.tolist() == [8, 16, 4, -16, -4]
    assert live.total.tolist() == [8, 24, 28, 12, 8]
    assert {name: column.tolist() for name, column in live.by_category.items()} == {
        "parameters": [8, 8, 8, 8, 8],
        "activations": [0, 16, 16, 0, 0],
        "temporaries": [0, 0, 4, 4, 0],
    }
    assert (live.peak_row, live.peak_bytes) == (2, 28)
    assert live.alive_at(2) == [1, 0, 2]  # the largest first
    assert live.alive_at(4) == [0]


def test_the_first_of_two_equal_peaks_counts():
    trace = trace_of(["a", "b"], [Storage(8, born=0, died=0), Storage(8, born=1)])
    assert live_bytes(trace).peak_row == 0


def test_the_hosts_memory_is_another_place():
    trace = trace_of(["a", "b"], [Storage(8, born=0, on_host=True), Storage(4, born=1)])
    assert live_bytes(trace).total.tolist() == [4]
    host = live_bytes(trace, on_host=True)
    assert (host.total.tolist(), host.event.tolist()) == ([8], [0])


def test_a_trace_without_storages_has_no_peak():
    live = live_bytes(trace_of(["a"], []))
    assert (live.peak_row, live.peak_bytes, live.by_category) == (-1, 0, {})
