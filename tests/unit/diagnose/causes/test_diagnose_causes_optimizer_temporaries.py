"""Temporaries of the update, with numbers calculated by hand."""

from peak_evidence import evidence, shares, tried
from plimsoll.diagnose.causes.optimizer_temporaries import findings

MADE_OF = shares(activations=900, temporaries=100)


def test_only_where_the_peak_is_in_the_update():
    (finding,) = findings(evidence(phase="optimizer", shares=MADE_OF, remedies=(tried("optimizer_kernel"),)))
    assert finding.title == "temporaries of the optimizer's update: 100.0 MiB, 8% of the peak"
    assert str(finding.remedy) == "optimizer_kernel=1"
    assert findings(evidence(phase="backward", shares=MADE_OF)) == ()
    assert findings(evidence(phase="optimizer", shares=shares(activations=901, temporaries=99))) == ()
