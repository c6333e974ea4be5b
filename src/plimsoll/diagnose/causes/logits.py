"""The logits: scores of every token of the vocabulary at every position, their logarithms, and their gradient.

Found where memory ran out and activations and temporaries whose last dimension is the size of the vocabulary are at
least a tenth of the peak. Only the largest things that are alive at the peak are looked at, so that it may be more.
Does NOT find them where the size of the vocabulary is not known.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import finding_of_part, is_large, part_of_holdings, shape_of
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.prediction import Holding

_LEAST_SHARE = 0.1
_CATEGORIES = ("activations", "temporaries")


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find what the scores of all tokens take."""
    holdings = [one for one in evidence.holdings if _is_of_vocabulary(one, evidence.vocab_size)]
    part = part_of_holdings(holdings, evidence.holdings_known)
    if part is None or not is_large(evidence, part, _LEAST_SHARE):
        return ()
    facts = [Fact(text=f"{one.count} x {one.shape}, {one.category}", known=evidence.holdings_known) for one in holdings]
    instead = "compute the loss some tokens at a time, without all logits at once (docs/techniques/chunked_loss.md)"
    what = f"the scores of all {evidence.vocab_size:,} tokens of the vocabulary"
    return (
        finding_of_part(
            evidence,
            "logits",
            part,
            what=what,
            instead=instead,
            facts=facts,
        ),
    )


def _is_of_vocabulary(holding: Holding, vocab_size: int | None) -> bool:
    shape = shape_of(holding)
    return holding.category in _CATEGORIES and len(shape) > 1 and shape[-1] == vocab_size
