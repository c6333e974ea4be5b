"""Records in a notebook."""

import subprocess
import sys

import evidence_records
from plimsoll.records import Shown


def test_a_record_is_shown_by_the_reports_and_other_things_by_their_text():
    assert "One cause was found in 30 steps" in evidence_records.diagnosis()._repr_html_()
    assert evidence_records.empty_run().device._repr_html_() is None
    assert Shown.to_html is not None


def test_importing_the_package_loads_no_report():
    code = (
        "import sys, plimsoll.records.plan; print('plimsoll.report.notebook' in sys.modules, 'plotly' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
