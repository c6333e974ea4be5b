"""A variable that keeps a second copy of weights or states: a loaded checkpoint, the best weights, an average.

Reported for a live process if a variable or an attribute holds a copy (see `plimsoll.diagnose.copies`) of at least a
twentieth of the training's memory. Tensors that the model or an optimizer also uses do not count.
"""

from __future__ import annotations

from plimsoll.diagnose.causes.helpers.kept import finding_of_kept, much
from plimsoll.diagnose.evidence import Evidence, Kept
from plimsoll.records.diagnosis import Finding
from plimsoll.records.units import format_bytes

_CAUSE = "checkpoint_kept"
_LEAST_SHARE = 0.05


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find copies of weights or states that are kept alive."""
    return tuple(_of_kept(evidence, kept) for kept in much(evidence, _LEAST_SHARE) if kept.copy_of)


def _of_kept(evidence: Evidence, kept: Kept) -> Finding:
    size, name = format_bytes(kept.num_bytes), kept.name
    if kept.copy_of == "checkpoint":
        title = f"`{name}` keeps a loaded checkpoint alive: {size} that neither the model nor the optimizer uses"
        letting_go, code = _letting_go(name)
        remedy = (
            f"{letting_go} once all is loaded from it; or load it with `torch.load(..., mmap=True)` and "
            "`model.load_state_dict(..., assign=True)`, before the optimizer is made"
        )
    elif kept.copy_of == "weights":
        title, code = f"`{name}` keeps a copy of the weights: {size}", ""
        remedy = f"write it to a file with `torch.save`, if it is for later{_elsewhere(evidence)}"
    else:
        title, code = f"`{name}` is a second model of the same shape, which is not trained: {size}", ""
        remedy = f"write its weights to a file with `torch.save` while no step needs them{_elsewhere(evidence)}"
    finding = finding_of_kept(evidence, kept, _CAUSE, title=title, remedy=remedy, code=code)
    return finding.model_copy(update={"is_unused": kept.copy_of != "model"})


def _letting_go(name: str) -> tuple[str, str]:
    """Return the remedy that deletes the variable of a copy, or sets its attribute to ``None``.

    Returns:
        the remedy as a phrase for a sentence, and its line of code.
    """
    code = f"{name} = None" if "." in name else f"del {name}"
    return f"write `{code}`", code


def _elsewhere(evidence: Evidence) -> str:
    """Return the end of the remedy, for a copy that is still needed: keep it on the CPU, or in half precision."""
    on_host = "keep it in half precision" if evidence.kind == "cpu" else "keep it on the CPU, or in half precision"
    return f"; else {on_host}"
