"""Embeddings and output layers: a row for every token of the vocabulary, with its gradient and its optimizer states.

Reported if memory ran out and parameters, gradients and optimizer states of shape [vocabulary, ...] are at least a
fifth of the peak. Only the largest tensors at the peak are examined. Not reported if the size of the vocabulary is
unknown.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import (
    facts_of_holdings,
    findings_of_part,
    part_of_category,
    part_of_holdings,
    shape_of,
)
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Finding

_LEAST_SHARE = 0.2
_CATEGORIES = ("parameters", "gradients", "optimizer states")
_INSTEAD = (
    "train a smaller vocabulary (`tokenizer.vocab_size`), tie the output layer to the embedding, or keep the table "
    "outside of memory (docs/embeddings.md)"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find large embeddings and output layers."""
    holdings = [
        one
        for one in evidence.holdings
        if one.category in _CATEGORIES and len(shape_of(one)) == 2 and shape_of(one)[0] == evidence.vocab_size
    ]
    part = part_of_holdings(holdings, evidence.holdings_known) or part_of_category(evidence, "embeddings")
    return findings_of_part(
        evidence,
        "embeddings",
        part,
        _LEAST_SHARE,
        what="tables with a row for every token",
        instead=_INSTEAD,
        facts=facts_of_holdings(evidence, holdings),
    )
