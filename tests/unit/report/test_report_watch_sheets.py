import pytest

import watch_records
from plimsoll.records.units import format_bytes
from plimsoll.report.watch_sheets import limit_sheet, process_sheet, sentences, sheets_of, time_sheet
from watch_records import MIB, growing, killed, use


def test_the_sentences_say_how_much_how_it_ended_and_what_was_near():
    assert sentences(killed()) == (
        "90 samples in 2 min 58 s; highest private memory 1.0 GiB, at 2 min 58 s.",
        "Process 7 was killed by SIGKILL; the kernel has killed for memory meanwhile (its control group counts it).",
        "Near its limit: cgroup v2 memory.max of /job.",
    )
    assert sentences(growing(1)) == (
        "1 sample in 0 ms; highest private memory 150.0 MiB, at 0 ms.", "The recording is incomplete.",
    )  # fmt: skip
    assert sentences(growing(0)) == ("No sample of process 7 was recorded.", "The recording is incomplete.")


def test_each_limit_has_its_highest_and_when_it_first_warned():
    machine, group = limit_sheet(killed()).rows
    assert machine[:5] == ("memory of the machine", "400.0 MiB", "1000.0 MiB", "40%", "")
    assert group == ("cgroup v2 memory.max of /job", "990.0 MiB", "1000.0 MiB", "99%", "2 min 00 s", "▁▂▃▃▄▅▆▆▇█")


def test_processes_are_sorted_by_their_highest_and_say_when_they_were_seen():
    record = growing(10)
    late = record.samples[4].model_copy(update={"processes": (*record.samples[4].processes, use(9, 300))})
    record = record.model_copy(update={"samples": (*record.samples[:4], late, *record.samples[5:])})
    sheet = process_sheet(record)
    assert [row[0] for row in sheet.rows] == ["9 python", "7 python", "8 python"]
    assert [row[1:3] for row in sheet.rows] == [("8.0 s", "8.0 s"), ("0 ms", "18.0 s"), ("0 ms", "18.0 s")]
    assert sheet.rows[1][3:6] == ("100.0 MiB", "190.0 MiB", "190.0 MiB")


def test_shared_memory_has_a_column_where_there_is_some():
    sample = growing(1).samples[0].model_copy(update={"processes": (use(7, 10, shared_bytes=3 * MIB),)})
    sheet = process_sheet(growing(1).model_copy(update={"samples": (sample,)}))
    assert dict(zip([column.title for column in sheet.columns], sheet.rows[0], strict=True))["Shared"] == "3.0 MiB"
    assert "Shared" not in [column.title for column in process_sheet(growing(1)).columns]


def test_of_many_processes_twenty_are_listed():
    sample = growing(1).samples[0].model_copy(update={"processes": tuple(use(pid, pid) for pid in range(1, 51))})
    sheet = process_sheet(growing(1).model_copy(update={"samples": (sample,)}))
    assert (len(sheet.rows), sheet.title) == (20, "Processes, 20 of 50: private memory")


@pytest.mark.parametrize("num_samples", [1, 5, 12, 13, 1000])
def test_at_most_twelve_samples_are_listed_and_the_highest_is_one(num_samples):
    record = growing(num_samples, 1)
    sheet = time_sheet(record)
    assert len(sheet.rows) == min(num_samples, 12)
    assert sheet.rows[-1][1] == format_bytes((150 + num_samples - 1) * MIB)
    assert [len(row) for row in sheet.rows] == [len(sheet.columns)] * len(sheet.rows)


def test_a_run_adds_its_steps_also_where_some_samples_have_none():
    record = watch_records.run_watch()
    first = record.samples[0].model_copy(update={"run": None})
    sheet = time_sheet(record.model_copy(update={"samples": (first, *record.samples[1:])}))
    assert sheet.rows[0][3:] == ("", "", "")
    assert sheet.rows[1][3:] == ("12", "5.250", "12,345 tokens/s")


def test_an_empty_recording_has_no_rows():
    assert all(not sheet.rows for sheet in sheets_of(growing(0)))
