"""Attention scores: one number for every pair of positions, in every head, of every layer that saves them.

Reported if memory ran out and activations and temporaries of shape [..., tokens, tokens] are at least a tenth of the
peak. They only count if an operation of attention created them, such as a softmax, a product, dropout or a mask. Only
the largest tensors at the peak are examined. Flash and memory-efficient kernels never store the scores.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import facts_of_holdings, findings_of_part, part_of_holdings, shape_of
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding
from plimsoll.records.prediction import Holding

_LEAST_SHARE = 0.1
_CATEGORIES = ("activations", "temporaries")
# If the head size equals the text length, queries have the shape of scores, but are made by other operations.
_OPS = ("softmax", "bmm", "matmul", "dropout", "bernoulli", "where", "masked_fill", "mul", "add", "div")


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find large attention scores."""
    length = evidence.sequence_length
    holdings = [one for one in evidence.holdings if length and _is_of_pairs(one, length)]
    return findings_of_part(
        evidence,
        "attention_scores",
        part_of_holdings(holdings, evidence.holdings_known),
        _LEAST_SHARE,
        what=f"attention scores of {length or 0:,} x {length or 0:,} positions",
        facts=facts_of_holdings(evidence, holdings),
    )


def _is_of_pairs(holding: Holding, length: int) -> bool:
    """Return whether tensors are attention scores: they are 4-D, or 3-D and made by an attention module."""
    shape = shape_of(holding)
    if holding.category not in _CATEGORIES or len(shape) < 3 or shape[-2:] != (length, length):
        return False
    is_of_heads = len(shape) > 3 or "att" in holding.made.module
    op = holding.made.op
    return is_of_heads and (not op or any(name in op for name in _OPS))
