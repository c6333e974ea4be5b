"""torch's compiler is loaded only when it is needed, and earlier settings for it then hold."""

import json
import subprocess
import sys

import pytest
import torch._dynamo  # noqa: F401  -- here it runs at once
from tests import compiler_program
from tests.processes import environment


@pytest.fixture(scope="module")
def late():
    """Return the output of a process that defers the compiler."""
    command = [sys.executable, compiler_program.__file__]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plain(said):
    return json.loads(json.dumps(said))


@pytest.mark.cold
def test_training_and_tracing_need_no_compiler(late):
    assert not late["had_run"]
    assert late["trained"] == plain(compiler_program.trained())


@pytest.mark.cold
def test_what_has_no_stand_in_comes_from_the_compiler_itself(late):
    assert late["has_run"]
    assert late["view"] == plain(compiler_program.view())


@pytest.mark.cold
def test_marks_made_before_hold_when_something_is_compiled(late):
    graphs, results, calls = late["compiled"]
    assert [graphs, results, calls] == plain(compiler_program.compiled(*compiler_program.marked()))
    assert len(graphs) == 3, "what is disabled and what breaks divide it"


@pytest.mark.cold
def test_training_goes_on_with_the_compiler_as_without(late):
    assert late["trained_later"] == late["trained"]
