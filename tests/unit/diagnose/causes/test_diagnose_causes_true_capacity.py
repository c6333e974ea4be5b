"""Memory that is full without waste."""

from peak_evidence import FRAGMENTED, FULL, OTHERS, evidence, of_text, shares
from plimsoll.diagnose.causes.true_capacity import findings


def test_of_a_training_the_largest_category_beside_the_process_is_named():
    (finding,) = findings(evidence(shares=shares(baseline=600, activations=500, parameters=100)))
    assert finding.title == ("the training needs 1.2 GiB, most of it activations, and 800.0 MiB are available")
    assert [fact.text for fact in finding.evidence] == [
        "baseline: 600.0 MiB",
        "activations: 500.0 MiB",
        "parameters: 100.0 MiB",
    ]
    assert findings(evidence(shares=())) == ()


def test_of_a_text_it_says_what_is_missing():
    (finding,) = findings(of_text(FULL, place="train.py:9"))
    assert finding.title == "the device is full; the request exceeds free memory by 2.0 GiB"
    assert finding.place == "train.py:9"


def test_of_the_host():
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
    (finding,) = findings(of_text(text))
    assert finding.title.endswith("ran out when 4.0 KiB were requested")
    (finding,) = findings(of_text("MemoryError"))
    assert "states no sizes" in finding.evidence[0].text


def test_where_it_is_the_other_cause():
    assert findings(of_text(FRAGMENTED))[0].title.startswith("perhaps: the device is full")
    assert findings(of_text(OTHERS))[0].title.startswith("perhaps: ")
