"""A command finishes its work even if the reader of standard error goes away."""

import pytest
from tests.processes import run_program

BEGIN = """
import os
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
"""
STAGES = """
from plimsoll.report.progress import stages
with stages(quiet=False) as report:
    report("index", 1, 2)
    report("index", 2, 2)
"""
ROWS = """
from plimsoll.report.progress import row_rates
with row_rates("scored", quiet=False) as (report, loaded):
    report(1, 2, 1, 10)
    report(2, 2, 2, 20)
"""


@pytest.mark.parametrize("work", [STAGES, ROWS])
@pytest.mark.parametrize("terminal", ["", "import os; os.environ.update(FORCE_COLOR='1', TERM='xterm')\n"])
def test_work_goes_on_to_its_end(work: str, terminal: str):
    done = run_program(terminal + BEGIN + work + "print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")
