"""Results that are written once each: begun, resumed after any kind of end, and refused if runs would be mixed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.errors import OutputError
from plimsoll.inference.output import check_output, part_file

MADE_FROM = {"model": [["config.json", 12, "ab"]], "task": "score", "--max-length": 128}
BLOCKS = [b'{"row": 0}\n{"row": 1}\n', b'{"row": 2}\n', b'{"row": 3}\n{"row": 4}\n{"row": 5}\n']
WHOLE = b"".join(BLOCKS)


def write(out: Path, num_blocks: int = 3, finish: bool = True) -> None:
    """Write the missing part of the first blocks."""
    with part_file(out, MADE_FROM) as part:
        before = 0
        for block in BLOCKS[:num_blocks]:
            num_rows = block.count(b"\n")
            if before >= part.num_rows:
                part.append(block, num_rows, {"tokens": 10 * num_rows, "faults": 0})
            before += num_rows
        if finish:
            assert (part.counts["tokens"], part.counts["faults"]) == (60, 0)
            part.finish()


def test_the_output_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "y.jsonl"
    write(out, 2, finish=False)
    assert sorted(os.listdir(tmp_path)) == ["y.jsonl.part", "y.jsonl.part.json"]
    write(out)
    assert os.listdir(tmp_path) == ["y.jsonl"]
    assert out.read_bytes() == WHOLE


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3])
def test_what_is_behind_the_last_block_is_cut_off(tmp_path: Path, num_blocks: int) -> None:
    out, generator = tmp_path / "y.jsonl", random.Random(num_blocks)
    write(out, num_blocks, finish=False)
    with (tmp_path / "y.jsonl.part").open("ab") as file:
        file.write(generator.randbytes(100))  # a block that a kill or a power failure has torn
    write(out)
    assert out.read_bytes() == WHOLE


def test_a_part_file_that_was_changed_or_cut_is_refused(tmp_path: Path) -> None:
    out, part = tmp_path / "y.jsonl", tmp_path / "y.jsonl.part"
    write(out, 2, finish=False)
    good = part.read_bytes()
    for bad in (good[:-1], good.replace(b"1", b"2"), b""):
        part.write_bytes(bad)
        with pytest.raises(OutputError, match="has changed since it was written .* give --force to start over"):
            write(out)
    part.write_bytes(good)
    write(out)
    assert out.read_bytes() == WHOLE


def test_results_of_something_else_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "y.jsonl"
    write(out, 1, finish=False)
    other = MADE_FROM | {"--max-length": 64, "more": True}
    said = r"different --max-length \(was 128, is 64\), more \(was none, is true\): run the original command to resume"
    with pytest.raises(OutputError, match=said), part_file(out, other):
        pass
    with part_file(out, other, force=True) as part:
        assert part.num_rows == 0
    assert not list(tmp_path.iterdir())


def test_what_differs_is_named_of_things_with_parts(tmp_path: Path) -> None:
    model = {"config.json": [12, "ab"], "model.safetensors": [900, "cd"]}
    with part_file(tmp_path / "y.jsonl", {"model": model, "task": "score"}) as part:
        part.append(BLOCKS[0], 2, {})
    now = {"model": {"config.json": [12, "ab"], "model.safetensors": [900, "ef"], "a": [1, ""]}, "task": "score"}
    said = (
        r'different model: model.safetensors \(was \[900, "cd"\], is \[900, "ef"\]\), '
        r'model: a \(was none, is \[1, ""\]\):'
    )
    with pytest.raises(OutputError, match=said), part_file(tmp_path / "y.jsonl", now):
        pass


def test_of_what_differs_so_much_is_shown_as_a_line_has_room_for(tmp_path: Path) -> None:
    """60 characters, including the quotes."""
    with part_file(tmp_path / "y.jsonl", {"task": "x" * 58}) as part:
        part.append(BLOCKS[0], 2, {})
    said = rf'was "{"x" * 58}", is "{"y" * 59}\.\.\.\)'
    with pytest.raises(OutputError, match=said), part_file(tmp_path / "y.jsonl", {"task": "y" * 59}):
        pass


def test_without_a_row_nothing_was_begun(tmp_path: Path) -> None:
    """A command that is refused early leaves no file that would refuse a corrected command."""
    out = tmp_path / "y.jsonl"
    with pytest.raises(RuntimeError), part_file(out, {"task": "embed"}):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with part_file(out, {"task": "embed"}):
        state = (tmp_path / "y.jsonl.part.json").read_bytes()
    (tmp_path / "y.jsonl.part.json").write_bytes(state)  # the state after a kill
    (tmp_path / "y.jsonl.part").touch()
    write(out)
    assert out.read_bytes() == WHOLE


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("end", ["", ".part", ".part.json"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, force: bool, end: str) -> None:
    os.mkfifo(tmp_path / f"y{end}")
    with pytest.raises(OutputError, match="is not a regular file"), part_file(tmp_path / "y", {}, force):
        pass
    assert (tmp_path / f"y{end}").is_fifo()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="is not a regular file"), part_file(tmp_path / "folder", {}, force):
        pass


@pytest.mark.parametrize("end", ["", ".part", ".part.json"])
def test_what_is_read_is_not_replaced(tmp_path: Path, end: str) -> None:
    data = tmp_path / f"x.jsonl{end}"
    data.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "x.jsonl")
    for out in (tmp_path / "x.jsonl", *([tmp_path / "link"] if not end else [])):
        with pytest.raises(OutputError, match="is the input .*: give another --out"):
            check_output(out, True, (data,))
    (tmp_path / "model").mkdir()
    for out in (tmp_path / "model" / "y.jsonl", tmp_path / "model" / ".." / "model" / "y.jsonl"):
        with pytest.raises(OutputError, match="is inside the model folder .*: give an --out in another folder"):
            check_output(out, True, (data,), (tmp_path / "model",))
    check_output(tmp_path / "z.jsonl", True, (data,), (tmp_path / "model",))


def test_an_output_that_is_there_is_overwritten_only_when_forced(tmp_path: Path) -> None:
    out = tmp_path / "y.jsonl"
    out.write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists already and is not overwritten"):
        write(out)
    with part_file(out, MADE_FROM, force=True) as part:
        assert out.read_bytes() == b"precious"  # until the new file is complete
        part.append(WHOLE, 6, {})
        part.finish()
    assert out.read_bytes() == WHOLE


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with (
        part_file(tmp_path / "y.jsonl", MADE_FROM),
        pytest.raises(OutputError, match="another process is writing"),
        part_file(tmp_path / "y.jsonl", MADE_FROM),
    ):
        pass


@pytest.mark.parametrize("state", ["", "[]", "{}", json.dumps({"version": 99})])
def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "y.jsonl.part.json").write_text(state)
    with pytest.raises(OutputError, match="give --force to start over"):
        write(tmp_path / "y.jsonl")


@pytest.mark.parametrize("version", [1, 3])
def test_a_state_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    write(tmp_path / "y.jsonl", 1, finish=False)
    path = tmp_path / "y.jsonl.part.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": version}))
    with pytest.raises(OutputError, match=f"has version {version}, not 2: give --force to start over"):
        write(tmp_path / "y.jsonl")


@pytest.mark.parametrize("read_bytes", [1, 7, len(WHOLE) - 1, len(WHOLE)])
def test_what_was_written_is_checked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr("plimsoll.inference.output._READ_BYTES", read_bytes)
    out, part = tmp_path / "y.jsonl", tmp_path / "y.jsonl.part"
    write(out, finish=False)
    for changed in (0, len(WHOLE) - 2):
        bad = bytearray(WHOLE)
        bad[changed] ^= 1
        part.write_bytes(bad)
        with pytest.raises(OutputError, match="has changed since it was written"):
            write(out)
    part.write_bytes(WHOLE + b"torn")
    with part_file(out, MADE_FROM) as same:
        assert (same.num_rows, part.read_bytes()) == (6, WHOLE)
        assert same.made_from == json.loads(json.dumps(MADE_FROM))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no folder"):
        write(tmp_path / "missing" / "y.jsonl")
    with pytest.raises(OutputError, match=r"cannot write /proc/y\.jsonl"):
        write(Path("/proc/y.jsonl"))


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from plimsoll.errors import OutputError
from plimsoll.inference.output import part_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with part_file(Path(sys.argv[1]), {}) as part:
    part.append(b"x" * 4095 + b"\\n", 1, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (6144, resource.RLIM_INFINITY))
    try:
        part.append(b"y" * 4095 + b"\\n", 1, {})
    except OutputError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with part_file(Path(sys.argv[1]), {}) as part:
    print(part.num_rows)
    part.append(b"z" * 4095 + b"\\n", 1, {})
    part.finish()
"""


def test_after_a_full_disk_it_goes_on_behind_the_last_whole_block(tmp_path: Path) -> None:
    """RLIMIT_FSIZE accepts some bytes of the second block and fails the rest, like a full disk."""
    out = tmp_path / "y.jsonl"
    command = [sys.executable, "-c", FULL_DISK, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = f"cannot write {out}: File too large; free some space and run the same command again to resume\n1\n"
    assert done.stdout == said
    assert out.read_bytes() == b"x" * 4095 + b"\n" + b"z" * 4095 + b"\n"
