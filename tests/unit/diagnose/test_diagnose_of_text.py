"""The diagnosis of a text: what is said of each likely cause."""

import io
import sys

import pytest

from plimsoll.diagnose.explain import explain
from plimsoll.diagnose.of_text import diagnosis_of_text
from plimsoll.errors import InputError
from processes import run_program


def said(text):
    return diagnosis_of_text(io.BytesIO(text.encode()), "log")


GPU = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 24.00 GiB of which {} GiB is free. "
REST = (
    "Including non-PyTorch memory, this process has {} GiB memory in use. Of the allocated memory {} GiB is allocated "
    "by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GPU.format(3, 1) + REST.format(23, 21, 0), "2.0 GiB more than is free was asked for"),
        (
            GPU.format(1, 0.5) + REST.format(23, 18, 4),
            "holds 4.0 GiB that it does not use, and no piece of it has the 1.0",
        ),
        (
            GPU.format(2, 1) + "Process 9 has 20.00 GiB memory in use. " + REST.format(2, 1, 0),
            "hold 20.0 GiB of the device",
        ),
        (GPU.format(100, 1), "look at the shapes"),
        (GPU.format(1, 2), "2.0 GiB were free when 1.0 GiB were asked for"),
        ("CUDA error: out of memory", "The text states no sizes"),
        ("MemoryError", "The host's memory, or the limit of its control group, ran out. "),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.",
            "when 4.0 KiB were asked for",
        ),
        ("DataLoader worker (pid 1) is killed by signal: Bus error.", "--shm-size"),
        (
            "XPU out of memory. Tried to allocate 1 GiB. GPU 0 has a total capacity of 2 GiB",
            "The device is full: smaller",
        ),
    ],
)
def test_what_the_numbers_say(text, expected):
    diagnosis = said(text)
    assert diagnosis.has_answer
    assert expected in diagnosis.notes[0]


def test_other_errors_are_counted_and_what_is_none_is_said():
    assert (
        said("MemoryError\n" + "\n" * 20 + "std::bad_alloc\n").notes[1].startswith("1 other out-of-memory error stands")
    )
    diagnosis = said("all is well\n")
    assert not diagnosis.has_answer
    assert diagnosis.event.kind == "jvm/other_not_oom"
    assert diagnosis.notes == ("No text that means out of memory was found in 1 line.",)


def test_a_file_is_explained_and_one_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("MemoryError\n")
    assert explain(path).subject == "train.log"
    path.chmod(0)
    if sys.platform == "linux" and not _reads(path):
        with pytest.raises(InputError, match="cannot read"):
            explain(path)


def _reads(path):
    try:
        path.read_bytes()
    except PermissionError:
        return False
    return True


def test_a_text_is_explained_without_torch(tmp_path):
    (tmp_path / "log").write_text("MemoryError\n")
    program = (
        "import sys; from plimsoll.diagnose.explain import explain; explain(sys.argv[1]); "
        "assert 'torch' not in sys.modules"
    )
    done = run_program(program, str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
