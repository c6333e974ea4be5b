"""The logits: scores of every token of the vocabulary at every position, their logarithms, and their gradient.

Reported if memory ran out and at least a tenth of the peak are activations and temporaries with the vocabulary as last
dimension. Only the largest tensors at the peak are examined, so the size is a lower bound. Not reported if the size of
the vocabulary is unknown.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import facts_of_holdings, findings_of_part, part_of_holdings, shape_of
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding
from plimsoll.records.prediction import Holding

_LEAST_SHARE = 0.1
_CATEGORIES = ("activations", "temporaries")


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find large logits."""
    holdings = [one for one in evidence.holdings if _is_of_vocabulary(one, evidence.vocab_size)]
    return findings_of_part(
        evidence,
        "logits",
        part_of_holdings(holdings, evidence.holdings_known),
        _LEAST_SHARE,
        what=f"the scores of all {evidence.vocab_size or 0:,} tokens of the vocabulary",
        facts=facts_of_holdings(evidence, holdings),
    )


def _is_of_vocabulary(holding: Holding, vocab_size: int | None) -> bool:
    shape = shape_of(holding)
    return holding.category in _CATEGORIES and len(shape) > 1 and shape[-1] == vocab_size
