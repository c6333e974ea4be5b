"""Cached results: returned complete for equal inputs or not at all, bounded in size, and cleared."""

import os
import shutil
from pathlib import Path
from random import Random

import pytest

from plimsoll.errors import OutputError
from plimsoll.files import cached_answers

FACTS = {"job": {"batch_size": 16}, "versions": ["2.13"]}
CONTENT = Random(0).randbytes(3000)  # incompressible


def entries():
    return sorted(path for path in (Path(os.environ["PLIMSOLL_CACHE"]) / "answers").rglob("*") if path.is_file())


def sizes():
    return {kind.name: (kind.num_files, kind.num_bytes) for kind in cached_answers.contents().kinds}


def test_an_entry_is_found_under_its_kind_and_its_facts_only():
    cached_answers.write("plans", FACTS, CONTENT)
    assert cached_answers.read("plans", dict(reversed(FACTS.items()))) == CONTENT
    assert cached_answers.read("predictions", FACTS) is None
    assert cached_answers.read("plans", FACTS | {"versions": ["2.14"]}) is None
    cached_answers.write("plans", FACTS, b"newer")
    assert cached_answers.read("plans", FACTS) == b"newer"
    assert len(entries()) == 1


def test_a_part_of_an_entry_is_none_and_is_written_again():
    cached_answers.write("plans", FACTS, CONTENT)
    (path,) = entries()
    whole = path.read_bytes()
    for end in (0, 1, 31, 32, 33, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert cached_answers.read("plans", FACTS) is None, end
    cached_answers.write("plans", FACTS, CONTENT)
    assert cached_answers.read("plans", FACTS) == CONTENT


def test_an_entry_with_any_other_byte_is_none():
    cached_answers.write("plans", FACTS, b"a short one")
    (path,) = entries()
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
        assert cached_answers.read("plans", FACTS) is None, place


def test_an_entry_of_other_facts_or_of_another_program_is_none():
    cached_answers.write("plans", FACTS, CONTENT)
    (ours,) = entries()
    cached_answers.write("plans", {"job": "another"}, b"another")
    (theirs,) = set(entries()) - {ours}
    shutil.copy(theirs, ours)
    assert cached_answers.read("plans", FACTS) is None
    ours.write_text('{"record": "plan"}')
    assert cached_answers.read("plans", FACTS) is None
    ours.unlink()
    ours.mkdir()
    assert cached_answers.read("plans", FACTS) is None


def test_those_that_were_not_read_for_longest_make_room(monkeypatch):
    monkeypatch.setattr(cached_answers, "MOST_BYTES", 4 * len(CONTENT))
    for number in range(3):
        cached_answers.write("traces", {"number": number}, CONTENT)
        (newest,) = set(entries()) - {path for path in entries() if path.stat().st_mtime < 1000}
        os.utime(newest, (number, number))  # set a time long ago
    assert cached_answers.read("traces", {"number": 0}) == CONTENT  # reading makes it the most recently used entry
    cached_answers.write("plans", FACTS, CONTENT)
    assert cached_answers.read("traces", {"number": 1}) is None
    assert [cached_answers.read("traces", {"number": number}) for number in (0, 2)] == [CONTENT] * 2
    assert cached_answers.read("plans", FACTS) == CONTENT


def test_what_killed_processes_have_left_goes_and_what_others_write_now_stays():
    cached_answers.write("plans", FACTS, CONTENT)
    (path,) = entries()
    left, written = path.with_name("a.tmp-1"), path.with_name("b.tmp-2")
    for file in (left, written):
        file.write_bytes(b"a part")
    os.utime(left, (1, 1))
    cached_answers.write("plans", {"job": "another"}, CONTENT)
    assert (left.exists(), written.exists()) == (False, True)


def test_where_nothing_can_be_written_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "file"))
    cached_answers.write("plans", FACTS, CONTENT)
    assert cached_answers.read("plans", FACTS) is None
    assert not any(number for number, _ in sizes().values())


@pytest.fixture
def filled():
    """Fill a cache folder with files of each kind, and return the files that are not entries."""
    folder, others = Path(os.environ["PLIMSOLL_CACHE"]), []
    shutil.rmtree(folder)  # other tests have stored measured speeds
    for kind in ("predictions", "plans", "baselines", "traces"):
        cached_answers.write(kind, FACTS, CONTENT)
    for name in ("speed-1.json", "exchange-2-1.json", "calibration.json", "data/corpus-1/a", "embeddings/b/c"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10))
        others.append(path)
    return others


def test_every_kind_is_listed_with_its_files_and_bytes(filled):
    found = sizes()
    assert found.pop("speeds") == (2, 20)
    assert {found.pop(name) for name in ("calibration", "data", "embeddings")} == {(1, 10)}
    assert [number for number, _ in found.values()] == [1] * 4
    assert sum(num_bytes for _, num_bytes in found.values()) == sum(path.stat().st_size for path in entries())
    assert all(kind.used_seconds for kind in cached_answers.contents().kinds)


def test_clearing_leaves_what_takes_long_to_make_unless_it_is_named(filled):
    removed = cached_answers.clear()
    assert [kind.name for kind in removed.kinds] == ["predictions", "plans", "baselines", "traces", "speeds"]
    assert [kind.num_files for kind in removed.kinds] == [1, 1, 1, 1, 2]
    assert not entries()
    assert [path.name for path in filled if path.exists()] == ["calibration.json", "a", "c"]
    cached_answers.clear(("data", "calibration"))
    assert [path.name for path in filled if path.exists()] == ["c"]


def test_what_cannot_be_removed_is_said(filled, monkeypatch):
    def refused(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(
        OutputError, match=r"cannot remove .*exchange-2-1.json: Permission denied; change its permissions"
    ):
        cached_answers.clear(("speeds",))
