"""Padding: positions of a batch that hold no token of a text, because the batch is as long as its longest text.

Reported if memory ran out and on average at least a fifth of the tokens of a batch are padding, as counted from text
lengths. The effect is the same share of the activations and temporaries, which grow with the tokens of a batch. The
effect is an upper bound, because the longest batch sets the peak. Not handled: batches of a user's own loader.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.peak import Part, part_of_category, tried_remedy
from plimsoll.diagnose.evidence import Evidence
from plimsoll.records.diagnosis import Fact, Finding

_LEAST_SHARE = 0.2
_INSTEAD = (
    "batch texts of similar length (`data.order: by_length`), or truncate the few longest "
    "(`sequence_length`, `data.long_texts: truncate`); `plimsoll data inspect` compares them"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find a large share of padding."""
    share = evidence.padding_share
    if share is None or share < _LEAST_SHARE or not evidence.has_run_out:
        return ()
    parts = [part_of_category(evidence, name) or Part(0) for name in ("activations", "temporaries")]
    padded_bytes = int(share * sum(part.num_bytes for part in parts))
    tried = tried_remedy(evidence, "padding")
    return (
        Finding(
            cause="padding",
            title=f"{share:.0%} of the tokens of a batch are padding",
            evidence=(Fact(text=f"{share:.1%} of the positions of a batch hold no token", known="counted"),),
            peak_share=padded_bytes / evidence.peak_bytes if evidence.peak_bytes else None,
            remedy=tried.choices[0] if tried else _INSTEAD,
            effect_bytes=tried.saving_bytes if tried else padded_bytes or None,
            effect_known=("predicted" if tried else "assumed") if tried or padded_bytes else None,
        ),
    )
