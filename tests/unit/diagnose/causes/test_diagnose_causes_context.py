"""Memory before the model, with numbers calculated by hand for 800 MiB."""

from peak_evidence import evidence, shares
from plimsoll.diagnose.causes.context import findings


def test_two_fifths_of_what_there_is():
    (finding,) = findings(evidence(shares=shares(baseline=320, activations=800)))
    assert finding.title == "Python and its libraries take 320.0 MiB of 800.0 MiB before a model exists"
    assert finding.effect_bytes is None
    assert findings(evidence(shares=shares(baseline=319, activations=800))) == ()


def test_on_cuda_it_is_the_context():
    (finding,) = findings(evidence(kind="cuda", shares=shares(context=400, activations=800)))
    assert finding.title.startswith("the CUDA context and libraries take 400.0 MiB")
    assert findings(evidence(kind="cuda", shares=shares(baseline=400))) == ()


def test_without_a_limit_nothing_is_found():
    assert findings(evidence(limit_bytes=None, shares=shares(baseline=400))) == ()
