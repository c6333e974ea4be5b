"""A warning, given once, that some trainable parameters get no gradient, with their names and the cause if known.

Nothing else reveals such parameters: an optimizer skips them, and the loss still falls.

Not detected: parameters outside the model, and gradients that are zero. No cause is given for compiled or scripted
modules. Parameters sharded over ranks are not watched.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plimsoll.errors import PlimsollWarning

# A gradient may come later. Wait longer for a branch (layer, expert) if a parallel branch has had a gradient.
_FEW_STEPS, _MANY_STEPS = 5, 100
_MOST_NAMES = 3


class Cause(NamedTuple):
    """The cause of missing gradients, and the remedy."""

    why: str
    remedy: str


class Unreached(NamedTuple):
    """Parameters without a gradient up to a step, all with the same cause.

    Attributes:
        names: names of the parameters, in the model's order.
        num_all: number of trainable parameters.
        step: the number of the step after which the warning was given.
        cause: the cause.
    """

    names: tuple[str, ...]
    num_all: int
    step: int
    cause: Cause

    def __str__(self) -> str:
        more = f" and {len(self.names) - _MOST_NAMES} more" if len(self.names) > _MOST_NAMES else ""
        return (
            f"{len(self.names)} of {self.num_all} trainable parameters have had no gradient up to step {self.step} and "
            f"stay as they are ({', '.join(self.names[:_MOST_NAMES])}{more})"
        )


_IF_MEANT = "if this is intended, set requires_grad_(False)"
_CHECKPOINTED = Cause(
    "they run in torch.utils.checkpoint with use_reentrant=True on inputs that require no gradient, so they get none",
    "give use_reentrant=False, or make the inputs require one (enable_input_require_grads() of a Hugging Face model)",
)
_WITHOUT_GRAD = Cause(
    "their modules run under torch.no_grad()", "remove it, or set requires_grad_(False) if it is intended"
)
_NOT_USED = Cause(
    "their modules run, but the loss does not depend on their outputs, which are detached or unused", _IF_MEANT
)
_NOT_CALLED = Cause("their modules are not called", _IF_MEANT)
_UNKNOWN = Cause("the loss does not depend on them", _IF_MEANT)
_IS_SURE = (_CHECKPOINTED, _WITHOUT_GRAD)


class UnreachedWatch:
    """A watch over the first steps of a training run, which warns of parameters without a gradient.

    Hooks record the first gradient of each parameter. They are removed afterwards.

    Args:
        model: the model. Its parameters may be replaced before the first step.
        is_done: whether to watch nothing, as in a dry run.
    """

    def __init__(self, model: nn.Module, is_done: bool = False) -> None:
        self._model, self._is_done = model, is_done
        self._num_steps = 0
        self._reached: set[str] = set()
        self._watched: dict[str, tuple[nn.Parameter, RemovableHandle]] = {}
        self._causes: dict[str, Cause] = {}
        self._handles: list[RemovableHandle] = []
        self._said: set[str] = set()
        self._found: list[Unreached] = []

    @property
    def found(self) -> tuple[Unreached, ...]:
        """The parameters found without a gradient so far, except those that have received one since."""
        left = [
            one._replace(names=tuple(name for name in one.names if name not in self._reached)) for one in self._found
        ]
        return tuple(one for one in left if one.names)

    def begin(self) -> None:
        """Watch the backward passes of a step, or of a retry."""
        if self._is_done:
            return
        parameters = dict(self._model.named_parameters())
        for name in self._watched.keys() | parameters.keys():
            parameter, watched = parameters.get(name), self._watched.get(name)
            if watched is not None and watched[0] is not parameter:  # a technique has exchanged it
                self._watched.pop(name)[1].remove()
                watched = None
            if watched is None and parameter is not None and parameter.requires_grad and name not in self._reached:
                hook = self._note(name)
                self._watched[name] = parameter, parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if self._num_steps == 0 and not self._causes:
            self._causes = dict.fromkeys(self._watched, _UNKNOWN)
            self._handles = _watch_modules(self._model, self._causes)

    def look(self, step: int) -> None:
        """Warn of parameters without a gradient, once enough steps have passed. Call it after each completed step."""
        if self._is_done:
            return
        for name in self._reached & self._watched.keys():
            self._watched.pop(name)[1].remove()
        if not self._reached:  # this rank has had no target yet
            return
        self._num_steps += 1
        self._let_modules_go()
        found: dict[Cause, list[str]] = {}
        branches = {_branch_of(name) for name in self._reached}
        for name in self._watched.keys() - self._said:
            cause = self._causes.get(name, _UNKNOWN)
            pause_steps = _MANY_STEPS if _branch_of(name) in branches else _FEW_STEPS
            if cause in _IS_SURE or self._num_steps >= pause_steps:
                found.setdefault(cause, []).append(name)
        self._say(found, step)
        if self._num_steps >= _MANY_STEPS or not self._watched.keys() - self._said:
            self.close()

    def close(self) -> None:
        """Remove the hooks."""
        self._is_done = True
        self._let_modules_go()
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self._reached.add(name)

        return hook

    def _let_modules_go(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _say(self, found: dict[Cause, list[str]], step: int) -> None:
        if not found:
            return
        order = [name for name, _ in self._model.named_parameters()]
        num_all = len(self._reached) + len(self._watched)
        for cause, names in found.items():
            one = Unreached(tuple(sorted(names, key=order.index)), num_all, step, cause)
            warnings.warn(f"{one}: {cause.why}: {cause.remedy}", PlimsollWarning, stacklevel=5)
            self._found.append(one)
            self._said.update(names)


def _branch_of(name: str) -> str:
    """Return a parameter's name with layer and expert numbers removed, so that parallel branches get the same name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _watch_modules(model: nn.Module, causes: dict[str, Cause]) -> list[RemovableHandle]:
    """Install hooks on modules with watched parameters, and return the handles of the hooks.

    The hooks record in ``causes``, by parameter name, why a parameter may get no gradient.
    """
    if any(is_compiled(module) for module in model.modules()):
        return []
    handles = []
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name in module._parameters]
        own = [name for name in own if name in causes]
        if own:
            causes.update(dict.fromkeys(own, _NOT_CALLED))
            handles.append(module.register_forward_pre_hook(_noted(own, causes)))
    return handles


def _noted(own: list[str], causes: dict[str, Cause]) -> Callable[[nn.Module, Any], None]:
    def before(module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            cause = _NOT_USED
        elif causes[own[0]] == _NOT_USED:  # an evaluation between training passes
            return
        else:
            cause = _CHECKPOINTED if _is_in_checkpoint() else _WITHOUT_GRAD
        causes.update(dict.fromkeys(own, cause))

    return before


def _is_in_checkpoint() -> bool:
    """Return whether the caller runs in the forward pass of a re-entrant checkpoint."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith(("utils/checkpoint.py", "utils\\checkpoint.py")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, by ``torch.compile`` or as a script."""
    is_itself = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return is_itself or isinstance(module, torch.jit.ScriptModule)
