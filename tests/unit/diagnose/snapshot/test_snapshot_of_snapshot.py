"""The diagnosis of a snapshot file."""

import pytest

from plimsoll.diagnose.explain import explain
from plimsoll.errors import InputError
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.report.render import render
from snapshots import FORWARD, MIB, USER, Allocator, training, write


@pytest.fixture
def explained(tmp_path):
    def explain_it(allocator, **settings):
        return explain(write(tmp_path / "snapshot.pickle", allocator.as_dict(**settings)))

    return explain_it


def holes(num_pieces=20):
    """Return a snapshot in which every second block of 30 MiB is free, and 200 MiB are requested."""
    device = Allocator()
    pieces = [device.alloc(30 * MIB, USER[40]) for _ in range(num_pieces)]
    for address in pieces[::2]:
        device.free(address, USER[41])
    device.oom(200 * MIB, 3 * MIB, FORWARD, USER[42])
    return device


def test_fragmentation(explained):
    diagnosis = explained(holes())
    event = diagnosis.event
    assert (event.likely_cause, event.place, event.tried_to_allocate) == ("fragmentation", "train.py:42", 200 * MIB)
    assert (event.free, event.derived_reserved_unallocated) == (3 * MIB, 300 * MIB)
    (finding,) = diagnosis.findings
    assert (finding.cause, finding.effect_bytes) == ("fragmentation", 300 * MIB)
    assert finding.code == "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert [fact.text for fact in finding.evidence] == [
        "200.0 MiB were requested, and 300.0 MiB of the 600.0 MiB reserved were unused",
        "the largest unused block has 30.0 MiB",
    ]


def test_what_is_set_already_is_not_said_again(explained):
    (finding,) = explained(holes(), expandable_segments=True).findings
    assert not finding.code


def test_the_pieces_at_the_end_are_not_those_of_an_error_long_ago(explained):
    device = holes()
    device.alloc(MIB)
    (finding,) = explained(device).findings
    assert len(finding.evidence) == 1


def test_a_full_device(explained):
    device = training(1)
    device.oom(50 * MIB, 10 * MIB, FORWARD, USER[42])
    diagnosis = explained(device)
    assert (diagnosis.event.likely_cause, diagnosis.event.likely_cause_alt) == ("true_capacity", "other_process")
    assert diagnosis.findings == ()
    assert diagnosis.peak_bytes == sum(share.num_bytes for share in diagnosis.shares)


def test_a_request_that_nothing_could_hold(explained):
    device = training(1)
    device.oom((1 << 64) - 1, MIB, USER[42])
    assert explained(device).event.likely_cause == "absurd_request"


def test_what_private_pools_keep_is_no_fragmentation(explained):
    device = Allocator()
    device.segment(100 * MIB, pool=(0, 1))
    device.oom(50 * MIB, MIB, USER[42])
    diagnosis = explained(device)
    assert (diagnosis.event.likely_cause, diagnosis.findings) == ("true_capacity", ())


def test_more_reserved_than_ever_used_without_an_error(explained):
    device = Allocator()
    for size in range(10, 30):  # an odd size needs a new segment, and the next one fits into it
        device.free(device.alloc(size * MIB, USER[1]))
    (finding,) = explained(device).findings
    assert (finding.cause, finding.place) == ("fragmentation", "")
    assert finding.effect_bytes == (sum(range(10, 31, 2)) - 29) * MIB


def test_a_leak_and_its_notes(explained):
    diagnosis = explained(training(8, leak=3 * MIB))
    assert [finding.cause for finding in diagnosis.findings] == ["leak"]
    assert diagnosis.num_steps == 8
    assert diagnosis.has_answer


def test_what_is_not_explained_is_said(explained):
    device = Allocator(device=1)
    device.alloc(MIB, USER[1])
    device.alloc(MIB, USER[1], pool=(0, 1))
    device.segment(4 * MIB)["stream"] = 7
    first = Allocator().as_dict()
    first["segments"] = []
    notes = " ".join(explained(device).notes)
    assert "on device 1" in notes
    assert "Leaks were not looked for" in notes
    assert "Private pools (CUDA graphs, MemPool) have 2.0 MiB, of which 1.0 MiB are unused" in notes
    assert "2 streams" in notes


def test_the_device_that_ran_out_is_explained(tmp_path):
    full, other = Allocator(device=1), Allocator(address=1 << 40)
    full.oom(MIB, 0)
    other.alloc(100 * MIB)
    content = full.as_dict()
    content["segments"] = [*full.segments, *other.segments]
    content["device_traces"][0] = other.events
    diagnosis = explain(write(tmp_path / "a", content))
    assert diagnosis.event.device_index == 1
    assert "1 other device in the snapshot" in " ".join(diagnosis.notes)


def test_without_events(tmp_path):
    device = training(1)
    device.events = []
    diagnosis = explain(write(tmp_path / "a", device.as_dict()))
    assert diagnosis.peak_bytes == 48 * MIB
    assert "No events were recorded" in diagnosis.notes[1]
    assert "Nothing was found, peak 48.0 MiB." in str(render(diagnosis, "text"))


def test_an_empty_one(explained):
    diagnosis = explained(Allocator())
    assert (diagnosis.peak_bytes, diagnosis.shares, diagnosis.findings) == (0, (), ())


@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_every_form(explained, form):
    diagnosis = explained(holes())
    page = render(diagnosis, form)
    assert "train.py:42" in str(page)
    if form == "json":
        assert Diagnosis.from_json(page) == diagnosis


def test_another_pickle_is_refused(tmp_path):
    with pytest.raises(InputError, match="without the segments of a memory snapshot"):
        explain(write(tmp_path / "a", {"model": [1.0]}))
