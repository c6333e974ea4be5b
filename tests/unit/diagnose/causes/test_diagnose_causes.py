"""Contracts of all modules in the folder of causes."""

import subprocess
import sys
from dataclasses import replace

import pytest

from evidence_records import evidence
from plimsoll.diagnose.causes import every_cause
from processes import environment


def test_the_causes_are_the_modules_of_the_folder_but_for_what_they_share():
    assert {"graph_kept", "logits", "true_capacity"} <= every_cause().keys()
    assert not {name for name in every_cause() if name.startswith("_")}


@pytest.mark.parametrize("name", every_cause())
def test_a_run_of_which_nothing_is_known_has_no_cause(name):
    assert every_cause()[name](replace(evidence(), used_bytes=(), graphs=(), peak_bytes=None, last_step=0)) == ()


@pytest.mark.parametrize("name", every_cause())
def test_a_finding_says_its_cause(name):
    assert {finding.cause for finding in every_cause()[name](evidence())} <= {name}


def test_causes_need_no_torch():
    code = (
        "import sys; from plimsoll.diagnose.explain import explain; from plimsoll.diagnose.causes import every_cause;"
        "every_cause(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
