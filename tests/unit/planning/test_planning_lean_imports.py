"""Lean imports: a command imports only the modules that its job uses, and behaves as if it imported all."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import lean_program
from tests.processes import environment

from plimsoll.cli.main import main
from plimsoll.planning.lean_imports import _Finder, _from_the_end, leave_out_unused
from plimsoll.records.job import Job

FIELDS = {"model": "gpt2", "data": {"train": "nowhere.txt", "on_the_fly": True, "long_texts": "truncate"}}


@pytest.fixture(scope="module")
def lean():
    """Return the results of a separate process that leaves out the modules that its job does not use."""
    done = subprocess.run(
        [sys.executable, lean_program.__file__], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.cold
def test_what_no_training_uses_is_not_loaded_and_can_be(lean):
    assert lean["loaded"] == []
    assert lean["findable"]


@pytest.mark.cold
def test_traces_and_losses_are_those_of_a_process_that_imports_all(lean):
    assert lean["losses"] == lean_program.losses()
    assert lean["traces"] == lean_program.traces()


COUNTED = """
import atexit, sys
atexit.register(lambda: print(len(sys.modules), file=sys.stderr))
from plimsoll.cli.main import main
main()
"""
NET = {"architecture": "lstm", "embedding_size": 8, "hidden_size": 8}
GPT = {"architecture": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}
ON_CARD = ["predict", "job.yaml", "--device", "rtx3060"]
PLAN = ["plan", "job.yaml", "--device", "rtx3060"]


@pytest.mark.cold
@pytest.mark.parametrize(
    ("arguments", "model", "ceiling"),
    [
        (["--help"], NET, 460),  # measured: 416
        (["predict", "job.yaml", "--set", "optimizer.l=3"], GPT, 660),  # 583
        pytest.param(ON_CARD, NET, 2600, marks=pytest.mark.long),  # 2313; 2593 with the compiler
        pytest.param(ON_CARD, GPT, 3000, marks=pytest.mark.long),  # 2673; 3591 with all imports of transformers
        pytest.param(PLAN, NET, 2600, marks=pytest.mark.long),  # 2361; 2741 with scipy
    ],
    ids=["help", "refusal", "lstm", "gpt2", "plan"],
)
def test_a_command_imports_no_more_than_so_many_modules(tmp_path, arguments, model, ceiling):
    """The limit has an eighth of headroom for other versions of libraries; the standard library counts, too."""
    (tmp_path / "text.txt").write_text("A few words. " * 99)
    job = {"model": model, "data": "text.txt", "tokenizer": {"vocab_size": 300}, "sequence_length": 8, "batch_size": 2}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-c", COUNTED, *arguments]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert int(done.stderr.split()[-1]) <= ceiling, done.stderr


FIRST_SIGN = """
import os, sys
import plimsoll.report.progress as progress
progress._is_drawn_on = lambda: True
def seen(event, details):
    if event == "subprocess.Popen" and progress.ticker.__file__ in details[1]:
        print(len(sys.modules), "torch" in sys.modules, flush=True)
        os._exit(0)
sys.addaudithook(seen)
from plimsoll.cli.main import main
main()
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    "arguments",
    [
        ["probe"],
        ["predict", "job.yaml"],
        ["plan", "job.yaml", "--compare"],
        ["plan", "model", "--inference"],
        ["train", "job.yaml"],
        ["apply", "model", "--data", "text.txt", "--out", "out.jsonl"],
        ["shrink", "model", "--out", "small"],
        ["embeddings", "info", "text.txt"],
        ["embeddings", "subset", "text.txt", "--corpus", "text.txt"],
        ["embeddings", "convert", "text.txt", "-o", "rows.npy"],
        ["data", "bench", "job.yaml"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_a_command_says_what_it_does_before_it_imports_much(tmp_path, arguments):
    (tmp_path / "text.txt").write_text("A few words. " * 99)
    (tmp_path / "job.yaml").write_text(json.dumps({"model": NET, "data": "text.txt"}))
    command = [sys.executable, "-c", FIRST_SIGN, *arguments]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    number, has_torch = done.stdout.split()
    assert int(number) <= 560, number  # measured: 379 to 500
    assert has_torch == "False"


def test_what_transformers_reads_of_its_files_is_the_same_from_the_end():
    from transformers.utils.import_utils import fetch__all__

    folder = Path(find_spec("transformers").origin).parent / "models"
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/*.py"))]
    texts += [
        "",
        "__all__ = ['a']",
        "x\n__all__ = ['a']\n__all__ = ['b']\ny",
        "a\n__all__ = [\n'b',\n]\n",
        "# __all__\n",
    ]
    texts += ["a\r__all__ = ['b']", "a\n__all__ = ['b']\x0c__all__ = ['c']", "a\n __all__ = ['b']"]
    read = [fetch__all__(text) for text in texts]
    assert [_from_the_end(fetch__all__)(text) for text in texts] == read
    assert sum(map(bool, read)) > 1000


@pytest.fixture
def num_finders(monkeypatch):
    """Return how many import finders a job adds to the process of a command."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys.modules["__main__"], "main", main, raising=False)

    def count(**changes):
        leave_out_unused(Job.from_fields(FIELDS | changes))
        return sum(isinstance(finder, _Finder) for finder in sys.meta_path)

    return count


def test_a_job_whose_imports_are_known_is_lean_once(num_finders):
    assert (num_finders(), num_finders(model="lstm")) == (1, 1)


def test_a_program_that_calls_plimsoll_is_left_alone(num_finders, monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "main")
    assert num_finders() == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "my_project.nets:build"},
        {"ranks": 2},
        {"allow": "lora"},
        {"quantization_aware": "int8"},
        {"distill": "teacher"},
        {"data": FIELDS["data"] | {"augment": {"function": "my_project.noise:typos"}}},
    ],
    ids=str,
)
def test_what_may_import_more_imports_as_ever(num_finders, changes):
    assert num_finders(**changes) == 0


@pytest.mark.parametrize(("config", "number"), [({"model_type": "gpt2"}, 1), ({"quantization_config": {}}, 0)])
def test_a_checkpoint_says_whether_it_is_quantized(num_finders, tmp_path, config, number):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert num_finders(model=str(tmp_path)) == number
