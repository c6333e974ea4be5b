"""An evaluation that keeps memory that only training needs: graphs, because ``no_grad`` is missing, or all outputs.

Reported for a live process whose models are all in evaluation mode, in two cases. In the first, a container that grows,
or collects tensors with graphs, holds at least a twentieth of the training's memory. In the second, no container does,
but at least a tenth of that memory is saved for a backward pass that never runs. If the model is in training mode, kept
graphs are reported as `graph_kept`.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.kept import finding_of_kept, much, training_bytes
from plimsoll.diagnose.evidence import Evidence, Kept, Seen
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.units import format_bytes

_CAUSE = "evaluation_keeps_graphs"
_LEAST_SHARE, _LEAST_SAVED_SHARE = 0.05, 0.1
_NO_GRAD = "put `with torch.inference_mode():` around the evaluation"
_COLLECTED = "add the metric up batch by batch, or keep only its inputs, such as `outputs.argmax(-1)`"


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find graphs and outputs that an evaluation keeps, although only training needs graphs."""
    seen = evidence.seen
    if seen is None or not seen.is_evaluating:
        return ()
    kept = [one for one in much(evidence, _LEAST_SHARE) if one.has_grown or (one.num_graphs and one.num_items > 1)]
    return tuple(_of_kept(evidence, one) for one in kept) or _of_graph(evidence, seen)


def _of_kept(evidence: Evidence, kept: Kept) -> Finding:
    if kept.num_graphs:
        title = f"evaluation without no_grad: `{kept.name}` collects tensors with their graphs"
        return finding_of_kept(evidence, kept, _CAUSE, title=title, remedy=_NO_GRAD, code=kept.remedy)
    title = f"evaluation collects outputs in `{kept.name}`"
    return finding_of_kept(evidence, kept, _CAUSE, title=title, remedy=_COLLECTED)


def _of_graph(evidence: Evidence, seen: Seen) -> tuple[Finding, ...]:
    saved_bytes = sum(share.num_bytes for share in evidence.shares if share.category == "activations")
    if not seen.records_graph or saved_bytes < _LEAST_SAVED_SHARE * training_bytes(evidence):
        return ()
    text = f"{format_bytes(saved_bytes)} are saved for a backward pass, and every model is in evaluation mode"
    return (
        Finding(
            cause=_CAUSE,
            title="evaluation without no_grad: the forward pass saves its activations",
            place=seen.evaluation_place,
            evidence=(Fact(text=text, known="counted"),),
            peak_share=min(saved_bytes / evidence.peak_bytes, 1.0) if evidence.peak_bytes else None,
            remedy=_NO_GRAD,
            code="with torch.inference_mode():",
            effect_bytes=saved_bytes,
            effect_known="counted",
        ),
    )
