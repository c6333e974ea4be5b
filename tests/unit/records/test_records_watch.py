import pytest

from plimsoll.errors import OutputError, RecordError
from plimsoll.records.watch import Line, WatchRecord, WatchSample, append

SAMPLE = WatchSample(seconds=1.5, processes=(), lines=(Line(name="machine", used_bytes=1, limit_bytes=4),))


def test_samples_come_back_but_for_a_torn_last_line(tmp_path):
    file = tmp_path / "watch.jsonl"
    append(file, SAMPLE)
    append(file, SAMPLE)
    with file.open("ab") as stream:
        stream.write(b'{"seconds": 3')
    assert WatchRecord.read(file).samples == (SAMPLE, SAMPLE)


def test_another_line_that_is_no_sample_is_refused_by_its_number(tmp_path):
    file = tmp_path / "watch.jsonl"
    append(file, SAMPLE)
    with file.open("ab") as stream:
        stream.write(b"{}\n")
    with pytest.raises(RecordError, match="line 2 of"):
        WatchRecord.read(file)


def test_a_file_that_cannot_be_read_or_written_is_said(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        WatchRecord.read(tmp_path / "none")
    with pytest.raises(OutputError, match="another --record"):
        append(tmp_path / "none" / "watch.jsonl", SAMPLE)
