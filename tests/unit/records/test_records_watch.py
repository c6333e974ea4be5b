import pytest

from plimsoll.errors import OutputError, RecordError
from plimsoll.records.watch import Line, WatchEnd, WatchRecord, WatchSample, append, begin, is_recording

HEAD = WatchRecord(subject="process 7")
FAR, NEAR = (Line(kind="shm", name="/dev/shm", used_bytes=1, limit_bytes=4, seconds_left=left) for left in (None, 9.0))
SAMPLE = WatchSample(seconds=1.5, processes=(), lines=(FAR,))
END = WatchEnd(seconds=2.0, how="killed", exit_code=-9, text="killed")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "watch.jsonl"
    begin(path, HEAD)
    return path


def test_samples_and_the_end_come_back_but_for_a_torn_last_line(file):
    append(file, SAMPLE)
    append(file, SAMPLE)
    with file.open("ab") as stream:
        stream.write(b'{"seconds": 3')
    assert WatchRecord.read(file) == HEAD.model_copy(update={"samples": (SAMPLE, SAMPLE)})
    file.write_bytes(file.read_bytes().rpartition(b"\n")[0] + b"\n")
    append(file, END)
    assert WatchRecord.read(file).end == END


def test_what_json_prints_is_read_as_a_recording(tmp_path):
    record = HEAD.model_copy(update={"samples": (SAMPLE,), "end": END})
    record.save(tmp_path / "watch.json")
    assert is_recording(tmp_path / "watch.json")
    assert WatchRecord.read(tmp_path / "watch.json") == record


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b'{"seconds": 1}\n', b"\n"])
def test_another_line_that_is_no_sample_is_refused_by_its_number(file, line):
    append(file, SAMPLE)
    with file.open("ab") as stream:
        stream.write(line)
    with pytest.raises(RecordError, match="line 3 of"):
        WatchRecord.read(file)


def test_a_file_that_cannot_be_read_or_written_is_said(tmp_path, file):
    with pytest.raises(RecordError, match="No such file"):
        WatchRecord.read(tmp_path / "none")
    with pytest.raises(RecordError, match="Is a directory"):
        WatchRecord.read(tmp_path)
    with pytest.raises(OutputError, match="choose another file with --record"):
        append(tmp_path / "none" / "watch.jsonl", SAMPLE)
    with pytest.raises(OutputError, match="exists already"):
        begin(file, HEAD)
    with pytest.raises(OutputError, match="choose another file with --record"):
        begin(tmp_path / "none" / "watch.jsonl", HEAD)


@pytest.mark.parametrize("content", [b"", b"\0\1\2", b"hello\n", b'{"record": "plan", "schema": 2}\n'])
def test_other_files_are_no_recordings(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    assert not is_recording(path)
    with pytest.raises(RecordError, match="line 1 of"):
        WatchRecord.read(path)


def test_a_folder_is_no_recording(tmp_path):
    assert not is_recording(tmp_path)


def test_a_limit_that_was_near_and_memory_that_ran_out_are_warnings():
    near = SAMPLE.model_copy(update={"lines": (FAR, NEAR)})
    assert near.warnings == (NEAR,)
    assert HEAD.model_copy(update={"samples": (SAMPLE, near)}).has_warned
    assert not HEAD.model_copy(update={"samples": (SAMPLE,), "end": END}).has_warned
    ran_out = END.model_copy(update={"how": "out_of_memory"})
    assert HEAD.model_copy(update={"end": ran_out}).has_warned
