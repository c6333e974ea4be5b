"""Saving the hooks of modules and tensors before a step, and restoring them if it is undone.

Code that registers a temporary hook may not remove it if memory runs out in between. Plimsoll's own hooks are not
touched: the code that registers them removes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
"""The containers of hooks and of the flags that control how hooks are called."""


class SavedHooks:
    """The hooks of modules and tensors at the time of construction.

    Args:
        of_modules: the containers in which modules store hooks; modules never replace them.
        tensors: tensors that may have hooks; their containers are created with the first hook.
    """

    def __init__(self, of_modules: Sequence[dict[int, Any]], tensors: Sequence[Tensor]) -> None:
        self._of_modules, self._tensors = of_modules, tensors
        self.content = {id(hooks): dict(hooks) for hooks in filter(None, self._containers())}

    def restore(self) -> None:
        """Restore these hooks and remove all others."""
        for hooks in self._containers():
            content = self.content.get(id(hooks), {})
            own = {number: hook for number, hook in hooks.items() if _is_own(hook)}
            if hooks != content | own:
                hooks.clear()
                hooks.update(content | own)

    def of_others(self) -> dict[int, dict[int, Any]]:
        """Return the hooks that are not Plimsoll's own, by the identity of their container."""
        found = {
            number: {one: hook for one, hook in hooks.items() if not _is_own(hook)}
            for number, hooks in self.content.items()
        }
        return {number: hooks for number, hooks in found.items() if hooks}

    def _containers(self) -> list[dict[int, Any]]:
        of_tensors = [getattr(tensor, name) for tensor in self._tensors for name in OF_TENSORS]
        return [*self._of_modules, *filter(None, of_tensors)]


def containers_of(modules: Sequence[nn.Module]) -> list[dict[int, Any]]:
    """Return the containers in which modules store their hooks."""
    own = (vars(module).get(name) for module in modules for name in OF_MODULES)
    return [hooks for hooks in own if isinstance(hooks, dict)]


def _is_own(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("plimsoll.")
