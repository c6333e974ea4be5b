"""The hooks of modules and tensors before a step, so that those a step leaves behind, or has taken away, are put back.

Code that registers a hook for a moment does not come to removing it where memory runs out in between. Hooks of
Plimsoll's own stay as they are: who registers them removes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
"""The containers of hooks, and of what says how they are called."""


class SavedHooks:
    """The hooks there are now.

    Args:
        of_modules: the containers of modules, which never change.
        tensors: what may have hooks; its containers come with the first.
    """

    def __init__(self, of_modules: Sequence[dict[int, Any]], tensors: Sequence[Tensor]) -> None:
        self._of_modules, self._tensors = of_modules, tensors
        self.content = {id(hooks): dict(hooks) for hooks in filter(None, self._containers())}

    def restore(self) -> None:
        """Have these hooks again, and no others."""
        for hooks in self._containers():
            content = self.content.get(id(hooks), {})
            own = {number: hook for number, hook in hooks.items() if _is_own(hook)}
            if hooks != content | own:
                hooks.clear()
                hooks.update(content | own)

    def of_others(self) -> dict[int, dict[int, Any]]:
        """Those of them that are not Plimsoll's own, by the identity of their container."""
        found = {
            number: {one: hook for one, hook in hooks.items() if not _is_own(hook)}
            for number, hooks in self.content.items()
        }
        return {number: hooks for number, hooks in found.items() if hooks}

    def _containers(self) -> list[dict[int, Any]]:
        of_tensors = [getattr(tensor, name) for tensor in self._tensors for name in OF_TENSORS]
        return [*self._of_modules, *filter(None, of_tensors)]


def containers_of(modules: Sequence[nn.Module]) -> list[dict[int, Any]]:
    """Return where modules keep their hooks."""
    own = (vars(module).get(name) for module in modules for name in OF_MODULES)
    return [hooks for hooks in own if isinstance(hooks, dict)]


def _is_own(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("plimsoll.")
