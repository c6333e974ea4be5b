"""Requests that are too large, and the tensor shape that explains them."""

import pytest

from peak_evidence import FULL, HUGE, MIB, evidence, holding, of_text
from plimsoll.diagnose.causes.absurd_request import findings

LARGE = holding(1800, "temporaries", "float32[60000, 4000]", count=2)


def test_one_tensor_that_is_larger_than_the_limit():
    (finding,) = findings(evidence(holdings=(LARGE,)))
    assert finding.title == "one tensor of 900.0 MiB (float32[60000, 4000]) is larger than all usable memory"
    assert (finding.place, finding.effect_known) == ("net, net.py:7", "predicted")
    assert findings(evidence(holdings=(holding(1800, "temporaries", "float32[60, 4]", count=3),))) == ()


def test_the_request_of_a_run_is_explained_by_the_tensor_of_its_size():
    (finding,) = findings(evidence(requested_bytes=900 * MIB, holdings=(LARGE,)))
    assert "(float32[60000, 4000])" in finding.title
    assert finding.effect_known == "measured"
    (finding,) = findings(evidence(requested_bytes=901 * MIB, holdings=(LARGE,)))
    assert finding.title.startswith("one tensor of 901.0 MiB is larger")


@pytest.mark.parametrize(
    ("code", "explained"),
    [
        (
            "x = torch.zeros(163_840, 163840)",
            "163,840 x 163,840 numbers of 4 bytes in `x = torch.zeros(163_840, 163840)`",
        ),
        ("x = torch.ones(2, 819200, 65536, dtype=torch.half)", "819,200 x 65,536 numbers of 2 bytes"),
        ("x = torch.zeros(n, n)", None),
        ("x = torch.zeros(163841, 999)", None),
        ("", None),
    ],
)
def test_numbers_of_the_line_that_failed(code, explained):
    """The request was for 100 GiB."""
    (finding,) = findings(of_text(HUGE, code=code))
    texts = [fact.text for fact in finding.evidence]
    assert len(texts) == (2 if explained is None else 3)
    assert explained is None or texts[2].startswith(explained)


def test_the_shape_that_numpy_states():
    text = "Unable to allocate 2.00 TiB for an array with shape (524288, 524288) and data type float64"
    (finding,) = findings(of_text(text))
    assert finding.title.startswith("perhaps: 2.0 TiB were requested")
    assert finding.evidence[-1].text == "an array of shape (524288, 524288) of float64"


def test_what_is_none():
    assert findings(of_text(FULL)) == ()
    assert findings(evidence(limit_bytes=None, requested_bytes=900 * MIB)) == ()
    assert findings(evidence(has_run_out=False, holdings=(LARGE,))) == ()
