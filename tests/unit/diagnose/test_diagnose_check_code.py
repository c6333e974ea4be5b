"""Checks of files and folders, comments that ignore findings, and fixes that change nothing else."""

import ast
import os
from pathlib import Path

import pytest

from plimsoll.diagnose.check_code import check_code
from plimsoll.errors import InputError

BAD = "import torch\nstate = torch.load('a.pt')\n"
FIXABLE = """\
# é
from torch.cuda.amp import autocast, GradScaler
scaler = GradScaler(init_scale=2.0)
for x, y in loader:
    with autocast(True):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    total += loss
"""
FIXED = """\
# é
from torch.amp import autocast, GradScaler
scaler = GradScaler("cuda", init_scale=2.0)
for x, y in loader:
    with autocast("cuda", enabled=True):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    total += loss.detach()
"""


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def found(*paths: Path, **options: object) -> list[tuple[str, int, str]]:
    return [(Path(one.file).name, one.line, one.rule) for one in check_code(paths, **options).findings]


def test_folders_are_walked_without_environments_and_hidden_ones(tmp_path):
    for name in (
        "a.py",
        "b/c.py",
        ".hidden/d.py",
        "venv/e.py",
        "b/__pycache__/f.py",
        "b/site-packages/g.py",
        "notes.txt",
    ):
        write(tmp_path / name, BAD)
    report = check_code([tmp_path])
    assert [Path(one.file).name for one in report.findings] == ["a.py", "c.py"]
    assert (report.num_files, report.num_lines) == (2, 4)
    assert found(tmp_path / "venv") == [("e.py", 2, "torch_load_without_map_location_or_mmap")]  # named by the user
    assert len(found(tmp_path / "a.py", tmp_path)) == 2  # each finding once


@pytest.mark.parametrize(
    ("comment", "is_found"),
    [
        ("", True),
        ("  # plimsoll: ignore[torch_load_without_map_location_or_mmap]", False),
        ("  # plimsoll: ignore[loss_graph_kept, torch_load_without_map_location_or_mmap]", False),
        ("  # plimsoll: ignore", False),
        ("  # plimsoll: ignore[loss_graph_kept]", True),
        ("  # plimsoll: ignored", True),
    ],
)
def test_comments_ignore(tmp_path, comment, is_found):
    assert bool(found(write(tmp_path / "a.py", BAD.rstrip() + comment + "\n"))) == is_found


def test_a_comment_of_any_line_of_the_statement_ignores(tmp_path):
    text = (
        "import torch\nx = f(\n    torch.load(  # plimsoll: ignore\n        'a'\n    )\n)\ny = '# plimsoll: ignore'\n"
    )
    assert found(write(tmp_path / "a.py", text)) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"import torch\ndef f(:\n", "line 2"),
        (b"import torch\n\xff\xfe\n", "utf-8"),
        (b"# coding: nonsense\nimport torch\n", "nonsense"),
        (b"import torch\n\0", "null"),
        (b"import torch\nx = " + b"(" * 500 + b")" * 500, "parenthes"),
        (b"import torch\nx = " + b"-" * 100_000 + b"1", "too deeply"),
    ],
    ids=["syntax", "not-utf-8", "unknown-encoding", "null", "parentheses", "too-deep"],
)
def test_what_cannot_be_read_is_said_and_the_rest_is_checked(tmp_path, content, reason):
    write(tmp_path / "bad.py", content)
    write(tmp_path / "good.py", BAD)
    report = check_code([tmp_path])
    assert [Path(one.file).name for one in report.findings] == ["good.py"]
    assert [Path(one.file).name for one in report.unread] == ["bad.py"]
    assert reason in report.unread[0].reason.lower()


def test_encodings_are_read_and_kept(tmp_path):
    path = write(tmp_path / "a.py", b"# coding: latin-1\n# \xe9\n" + FIXABLE.split("\n", 1)[1].encode())
    assert check_code([path], fix=True).num_fixed == 4
    assert path.read_bytes() == b"# coding: latin-1\n# \xe9\n" + FIXED.split("\n", 1)[1].encode()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_fixes_mend_what_they_can_once_and_leave_the_rest(tmp_path, newline):
    path = write(tmp_path / "a.py", FIXABLE.replace("\n", newline))
    path.chmod(0o755)
    before = found(path)
    report = check_code([path], fix=True)
    assert path.read_bytes().decode() == FIXED.replace("\n", newline)
    assert path.stat().st_mode & 0o777 == 0o755
    assert (len(before), report.num_fixed, report.findings) == (4, 4, ())
    assert check_code([path], fix=True).num_fixed == 0
    assert os.listdir(tmp_path) == ["a.py"]


def test_a_mended_loop_still_goes_over_the_lines(tmp_path):
    text = "import torch\nwith open('train.txt') as f:\n    lines = [line.strip() for line in f.readlines()]\n"
    path = write(tmp_path / "a.py", text)
    assert check_code([path], fix=True).num_fixed == 1
    assert path.read_text() == text.replace(".readlines()", "")
    ast.parse(path.read_text())


def test_a_fix_that_a_comment_ignores_is_not_made(tmp_path):
    text = FIXABLE.replace("total += loss", "total += loss  # plimsoll: ignore")
    path = write(tmp_path / "a.py", text)
    check_code([path], fix=True)
    assert "total += loss  # plimsoll" in path.read_text()


def test_a_link_stays_one(tmp_path):
    path = write(tmp_path / "real/a.py", FIXABLE)
    link = tmp_path / "b.py"
    link.symlink_to(path)
    check_code([link], fix=True)
    assert link.is_symlink()
    assert path.read_text() == FIXED


def test_rules_can_be_chosen(tmp_path):
    path = write(tmp_path / "a.py", FIXABLE + BAD)
    assert {rule for *_, rule in found(path, rules=["loss_graph_kept"])} == {"loss_graph_kept"}
    with pytest.raises(InputError, match="no rule 'los_graph'.*give one of.*loss_graph_kept"):
        check_code([path], rules=["los_graph"])


def test_paths_that_are_not_there_or_hold_nothing(tmp_path):
    with pytest.raises(InputError, match="no file or folder .*nowhere.*give"):
        check_code([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="no Python file in .*give"):
        check_code([tmp_path])


def test_how_far_it_is_is_told(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.py", BAD)
    told = []
    check_code([tmp_path], report=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = write(tmp_path / "a.py", FIXABLE)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(InputError, match="make it writable"):
            check_code([path], fix=True)
    finally:
        tmp_path.chmod(0o755)
    assert path.read_text() == FIXABLE


@pytest.mark.parametrize(
    "text",
    [
        "from torch.cuda.amp import autocast, custom_fwd\nwith autocast():\n    y = model(x)\n",
        "from torch.cuda.amp import autocast\ncontext = autocast if a else None\nwith autocast():\n    y = model(x)\n",
        "import torch\ndef rows(path):\n    with open('train.txt') as f:\n        return (x for x in f.readlines())\n",
        "import torch\nf = open('train.txt', 'r+')\nfor line in f.readlines():\n    f.write(line)\n",
    ],
    ids=["another-name-imported", "used-uncalled", "closed-by-then", "written-to"],
)
def test_what_a_fix_would_break_is_left_alone(tmp_path, text):
    path = write(tmp_path / "a.py", text)
    report = check_code([path], fix=True)
    assert path.read_text() == text
    assert report.findings
    assert report.num_fixed == 0


def test_a_pipe_is_no_file_and_waits_for_nobody(tmp_path):
    os.mkfifo(tmp_path / "a.py")
    write(tmp_path / "b.py", BAD)
    report = check_code([tmp_path])
    assert "not a regular file" in report.unread[0].reason
    assert len(report.findings) == 1
