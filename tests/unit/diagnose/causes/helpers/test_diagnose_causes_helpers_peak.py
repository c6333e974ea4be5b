"""Parts of a peak: their size, their place in the code, and the remedy that was tried."""

import pytest

from peak_evidence import MIB, SCORES, evidence, holding, shares, tried
from plimsoll.diagnose.causes.helpers.peak import (
    Part,
    findings_of_part,
    is_large,
    part_of_category,
    part_of_holdings,
    shape_of,
    techniques_for,
    tried_remedy,
)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [("float32[8, 128]", (8, 128)), ("int64[5]", (5,)), ("float32[]", ()), ("scratch of the kernel", ()), ("", ())],
)
def test_a_shape_is_read(shape, numbers):
    assert shape_of(holding(1, "temporaries", shape)) == numbers


def test_a_category_has_its_bytes_and_its_place():
    assert part_of_category(evidence(), "activations") == Part(990 * MIB, "predicted", ("net, net.py:7",))
    assert part_of_category(evidence(), "gradients") is None


def test_holdings_are_joined():
    part = part_of_holdings((SCORES, SCORES))
    assert (part.num_bytes, part.places) == (400 * MIB, ("net.attn, net.py:7",))
    assert part_of_holdings(()) is None


def test_a_part_is_large_against_what_the_training_takes_itself():
    """1,200 MiB less the 200 before the model."""
    assert is_large(evidence(), Part(100 * MIB), 0.1)
    assert not is_large(evidence(), Part(99 * MIB), 0.1)
    assert not is_large(evidence(has_run_out=False), Part(500 * MIB), 0.1)
    assert not is_large(evidence(peak_bytes=None), Part(500 * MIB), 0.1)


def test_the_first_technique_that_was_tried_alone_is_the_remedy():
    both = tried("heap").model_copy(update={"choices": (*tried("lora").choices, *tried("heap").choices)})
    seen = evidence(remedies=(both, tried("micro_batch"), tried("chunked_loss")))
    assert tried_remedy(seen, "logits") == tried("chunked_loss")
    assert tried_remedy(seen, "optimizer_states") is None


@pytest.mark.parametrize(
    ("remedies", "remedy", "effect_mib"),
    [((), "by hand", 240), ((tried("heap", 100),), "heap=1", 100), ((tried("heap", 900),), "heap=1", 240)],
)
def test_the_effect_is_what_is_saved_of_the_part(remedies, remedy, effect_mib):
    seen = evidence(remedies=remedies, shares=shares(activations=1000))
    said = {"what": "it", "instead": "by hand"}
    (finding,) = findings_of_part(seen, "fragmentation", Part(240 * MIB), 0.1, **said)
    assert findings_of_part(seen, "fragmentation", Part(240 * MIB), 0.9, **said) == ()
    assert finding.title == "it: 240.0 MiB, 20% of the peak"
    assert str(finding.remedy) == remedy
    assert (finding.effect_bytes, finding.effect_known, finding.peak_share) == (effect_mib * MIB, "predicted", 0.2)


def test_what_saves_little_of_a_part_gives_way_to_what_saves_most():
    seen = evidence(remedies=(tried("optimizer_offload", 40), tried("low_bit_optimizer", 90), tried("lora", 95)))
    cause = "optimizer_states"
    assert tried_remedy(seen, cause, 100 * MIB) == tried("low_bit_optimizer", 90)
    assert tried_remedy(seen, cause, 80 * MIB) == tried("optimizer_offload", 40)
    assert tried_remedy(seen, cause, 900 * MIB) == tried("lora", 95)


def test_what_was_not_tried_is_said_in_the_words_of_the_techniques():
    assert techniques_for("logits") == (
        "use torch.nn.functional.linear_cross_entropy or the Liger kernel (docs/techniques/chunked_loss.md); or "
        "accumulate gradients over smaller micro-batches (gradient_accumulation_steps in the Trainer) "
        "(docs/techniques/micro_batch.md)"
    )
