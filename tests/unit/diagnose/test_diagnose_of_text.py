"""The diagnosis of an error message: the findings for each likely cause."""

import io
import sys

import pytest

from oom_texts import TEXTS
from peak_evidence import FRAGMENTED, FULL, GPU, HUGE, OTHERS, SHM
from plimsoll.diagnose.explain import explain
from plimsoll.diagnose.of_text import diagnosis_of_text
from plimsoll.errors import InputError
from processes import run_program


def said(text):
    return diagnosis_of_text(io.BytesIO(text.encode()), "log")


@pytest.mark.parametrize(
    ("text", "causes", "title"),
    [
        (FULL, ["true_capacity"], "the request exceeds free memory by 2.0 GiB"),
        (FRAGMENTED, ["fragmentation", "true_capacity"], "holds 4.0 GiB that it does not use, and no block of it"),
        (OTHERS, ["other_process", "true_capacity"], "hold 20.0 GiB of the device"),
        (HUGE, ["absurd_request"], "100.0 GiB were requested at once"),
        ("MemoryError", ["true_capacity"], "host memory, or the limit of its control group, ran out"),
        (SHM, ["shm"], "shared memory ran out"),
        ("XPU out of memory. Tried to allocate 1 GiB. GPU 0 has a total capacity of 2 GiB", ["true_capacity"], "full"),
    ],
)
def test_what_the_numbers_say_is_found_the_likely_cause_first(text, causes, title):
    diagnosis = said(text)
    assert [finding.cause for finding in diagnosis.findings] == causes
    assert title in diagnosis.findings[0].title
    assert (diagnosis.has_answer, diagnosis.notes) == (True, ())


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (GPU.format(1, 2), "2.0 GiB were free when 1.0 GiB were requested"),
        ("CUDA error: out of memory", "The text states no sizes"),
    ],
)
def test_a_text_that_does_not_say_why_is_said_not_to(text, note):
    diagnosis = said(text)
    assert diagnosis.findings == ()
    assert note in diagnosis.notes[0]


def test_a_remedy_of_a_text_is_a_bound():
    (remedy,) = said(FRAGMENTED).remedies
    assert (remedy.known, remedy.saving_high_bytes, remedy.saving_bytes, remedy.fits) == ("bound", 4 << 30, None, None)
    assert remedy.code == "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert said(FULL).remedies == ()


@pytest.mark.parametrize(("text", "stated"), TEXTS.values(), ids=list(TEXTS))
def test_every_error_but_those_without_sizes_has_a_cause(text, stated):
    diagnosis = said(text)
    is_unknown = diagnosis.event.likely_cause == "unknown"
    assert (not diagnosis.findings) == is_unknown
    assert bool(diagnosis.notes) == is_unknown


def test_other_errors_are_counted_and_what_is_none_is_said():
    (note,) = said("MemoryError\n" + "\n" * 20 + "std::bad_alloc\n").notes
    assert note.startswith("1 other out-of-memory error comes")
    diagnosis = said("all is well\n")
    assert not diagnosis.has_answer
    assert diagnosis.event.kind == "jvm/other_not_oom"
    assert diagnosis.notes == ("No out-of-memory error was found in 1 line.",)


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


TRAIN = """import torch

def train(loader, model):
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss)
"""


LOG = """Traceback (most recent call last):
  File "{}", line 7, in train
    loss.backward()
RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \\
allocate 8388608 bytes. Error code 12 (Cannot allocate memory)
"""


def test_the_file_that_a_traceback_names_is_checked_for_mistakes(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    (note,) = said(LOG.format(program)).notes
    assert "train.py that cost memory, or undo what saves it: loss_graph_kept in line 8." in note
    assert note.endswith(f"See `plimsoll lint {program}`.")
    program.write_text(TRAIN + TRAIN.partition("\n")[2] * 7)
    assert "loss_graph_kept in line 36 and 3 more." in said(LOG.format(program)).notes[0]


@pytest.mark.parametrize(
    "text", [TRAIN.replace("(loss)", "(loss.item())"), "def broken(:", TRAIN.replace("loss.backward()", "pass"), None]
)
def test_a_file_without_mistakes_or_that_is_another_by_now_is_passed_over(tmp_path, text):
    program = tmp_path / "train.py"
    if text is not None:
        program.write_text(text)
    assert said(LOG.format(program)).notes == ()


def test_a_file_that_cannot_be_looked_for_is_passed_over(tmp_path):
    diagnosis = said(LOG.format(tmp_path / ("x" * 300) / "train.py"))
    assert (diagnosis.has_answer, diagnosis.notes) == (True, ())


def test_a_program_in_place_of_what_it_said_is_refused_with_what_to_type(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    with pytest.raises(InputError, match=r"is a program, not its output: give .*`python .*train\.py 2>&1 \|"):
        explain(program)


def test_a_pool_whose_process_was_ended_may_have_run_out():
    text = b"BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running"
    found = diagnosis_of_text(io.BytesIO(text), "a.log")
    assert not found.event.is_oom
    assert "the kernel killed it for memory" in found.notes[1]
