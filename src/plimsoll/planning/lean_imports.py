"""What a command's process leaves out when torch and transformers are imported, because its job has no use for it.

    leave_out_unused(job)  # before torch is imported

Transformers takes torch's compiler along (`torch._dynamo`, with sympy, inductor and distributed tensors) and, where
they are installed, accelerate, scipy and torchao: a third of the time that imports take, and 60 MiB of a budget. The
compiler is loaded when it is needed (`plimsoll.memory.compiler`).

Where torch or transformers are laid out otherwise, more is imported. Does NOT change a program that imports Plimsoll,
nor a job of which it is not known what it imports (see `leave_out_unused`).
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from plimsoll.memory.compiler import COMPILER, Deferring
from plimsoll.models.names import is_own_function

if TYPE_CHECKING:
    from plimsoll.records.job import Job

_INSTALLED = "transformers.utils.import_utils"
"""Where transformers asks what is installed, in functions that `functools.lru_cache` keeps the answers of."""
_LOOKS_THROUGH = "create_import_structure_from_path"
_READS = "fetch__all__"
_HIDDEN = ("accelerate", "scipy", "sklearn", "torchao")


def leave_out_unused(job: Job, is_own: bool | None = None) -> None:
    """Have a process of Plimsoll's own import no more for a job than its training uses.

    A job with code of the user's, a quantized model, a teacher, several ranks, or something that it allows changes
    nothing: memory is counted from what is there before the training, so all of it has to be.

    Args:
        job: whose model is to be built. To be called before torch is imported: what is there stays.
        is_own: whether the process is Plimsoll's own; by default if it was started as ``plimsoll``.
    """
    is_done = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not is_done and (is_a_command() if is_own is None else is_own) and _has_known_imports(job):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the block, which imports: a thousand collections would take a sixth of its time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_a_command() -> bool:
    """Whether this process was started as ``plimsoll``, and is no program that calls it, which may use the rest too."""
    main = getattr(sys.modules.get("__main__"), "main", None)
    return getattr(main, "__module__", None) == "plimsoll.cli.main"


def _has_known_imports(job: Job) -> bool:
    augment = job.data.augment
    has_own_code = is_own_function(job.model) or bool(augment and (augment.function or augment.token_function))
    is_quantized = isinstance(job.model, str) and _is_quantized(Path(job.model))
    has_others = job.quantization_aware or job.distill or job.ranks > 1 or is_quantized
    return not (has_own_code or has_others or job.allow)


def _is_quantized(folder: Path) -> bool:
    """Whether a checkpoint says so; who loads the model says what is wrong with one that cannot be read."""
    with suppress(OSError, ValueError):
        return "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return False


class _Finder(MetaPathFinder):
    """Finds the two modules that are loaded otherwise here."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module where it is, and have it loaded by a loader of ours."""
        if name not in {COMPILER, _INSTALLED}:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = Deferring(spec.loader) if name == COMPILER else _Asking(spec.loader)
        return spec


class _Asking(Loader):
    """Loads the module in which transformers asks what is installed, and asks for what is to be left out."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and have it keep that the hidden packages are not there."""
        import torch.distributed

        self._loader.exec_module(module)
        if hasattr(module, _LOOKS_THROUGH):
            setattr(module, _LOOKS_THROUGH, _once(getattr(module, _LOOKS_THROUGH)))
        if hasattr(module, _READS):
            setattr(module, _READS, _from_the_end(getattr(module, _READS)))
        # Transformers keeps the answers, and is then as where these are not installed. Others import them as ever.
        with _hidden(_HIDDEN):
            for name in _HIDDEN:
                _ask(module, f"is_{name}_available")
        is_available = torch.distributed.is_available
        torch.distributed.is_available = lambda: False  # with it go distributed tensors
        try:
            _ask(module, "is_torch_distributed_available")
        finally:
            torch.distributed.is_available = is_available


def _once(look_through: Callable[[str], Any]) -> Callable[[str | Path], Any]:
    """Remember what is in a folder: transformers reads the files of all its models twice when it is imported."""
    known = cache(look_through)
    return lambda path: known(str(path).removesuffix("/__init__.py"))


def _from_the_end(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Give what reads ``__all__`` in 1600 files no lines before it: it splits all of a file, and takes the last."""
    return lambda text: read(text[text.rfind("\n__all__") + 1 :])


def _ask(module: ModuleType, question: str) -> None:
    function = getattr(module, question, None)
    # An answer that is not kept would be another one later, when half of the modules rely on this one.
    if function is not None and hasattr(function, "cache_info"):
        function()


@contextmanager
def _hidden(packages: Sequence[str]) -> Iterator[None]:
    """Let nobody find some packages: with ``None`` in `sys.modules`, Python says that there are none."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)
