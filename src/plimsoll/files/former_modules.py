"""Former names of modules that the documentation of the previous release imported.

    install()
    from plimsoll.data.loader import Loader      # a DeprecationWarning that names plimsoll.data.batches.loader

`docs/architecture.md` has the table of old and new names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from plimsoll.records.former import warn_of_former

FORMER_MODULES = {
    "plimsoll.data.augment": "plimsoll.data.batches.augment",
    "plimsoll.data.augment_text": "plimsoll.data.batches.augment_text",
    "plimsoll.data.batching": "plimsoll.data.batches.batching",
    "plimsoll.data.index": "plimsoll.data.text.index",
    "plimsoll.data.lanes": "plimsoll.data.samples.stream_slots",
    "plimsoll.data.masks": "plimsoll.data.samples.masks",
    "plimsoll.data.loader": "plimsoll.data.batches.loader",
    "plimsoll.data.order": "plimsoll.data.batches.order",
    "plimsoll.data.packable": "plimsoll.data.samples.packable",
    "plimsoll.data.packing": "plimsoll.data.samples.packing",
    "plimsoll.data.pooling": "plimsoll.data.samples.pooling",
    "plimsoll.data.spans": "plimsoll.data.samples.text_windows",
    "plimsoll.data.streams": "plimsoll.data.samples.streams",
    "plimsoll.data.tags": "plimsoll.data.samples.tags",
    "plimsoll.data.texts": "plimsoll.data.samples.texts",
    "plimsoll.data.tokenizer": "plimsoll.data.tokens.tokenizer",
    "plimsoll.data.windows": "plimsoll.data.samples.windows",
    "plimsoll.models.in_segments": "plimsoll.models.recurrent.segments",
    "plimsoll.models.recurrent_tagger": "plimsoll.models.recurrent.model",
    "plimsoll.ranks": "plimsoll.distributed.ranks",
    "plimsoll.run": "plimsoll.planning",
    "plimsoll.run.placed": "plimsoll.inference.placement",
    "plimsoll.run.plan_inference": "plimsoll.planning.plan_inference",
    "plimsoll.workload": "plimsoll.models.workload",
}
_FORMER_NAMES = {"Lanes": "StreamSlots", "build_tagger": "build_recurrent"}


class _Former(MetaPathFinder, Loader):
    """An import finder that resolves former module names to the renamed modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in FORMER_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        today = FORMER_MODULES[spec.name]
        module = ModuleType(spec.name, f"Now `{today}`.")

        def attribute(name: str) -> Any:
            if name.startswith("__"):  # asked for by the import system and by inspection
                raise AttributeError(name)
            found = getattr(import_module(today), _FORMER_NAMES.get(name, name))
            warn_of_former(f"the module {spec.name}", today)
            return found

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has no code."""


def install() -> None:
    """Make former module names importable: register their finder after all other import finders."""
    if not any(isinstance(finder, _Former) for finder in sys.meta_path):
        sys.meta_path.append(_Former())
