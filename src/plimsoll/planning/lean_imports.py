"""Leaner imports: parts of torch and transformers that a command's job does not use are left out.

    leave_out_unused(job)  # before torch is imported

Transformers imports torch's compiler (`torch._dynamo`, with sympy, inductor and distributed tensors). It also imports
accelerate, scipy and torchao if these are installed. Together, these imports take a third of the import time and 60 MiB
of a budget. The compiler is loaded on demand (`plimsoll.memory.compiler`).

If the structure of torch or transformers changes, more modules are imported. Programs that import Plimsoll are
unchanged, and so are jobs with unknown imports (see `leave_out_unused`).
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
"""The module in which transformers checks for installed packages, with functions cached by `functools.lru_cache`."""
_LOOKS_THROUGH = "create_import_structure_from_path"
_READS = "fetch__all__"
_HIDDEN = ("accelerate", "scipy", "sklearn", "torchao")


def leave_out_unused(job: Job, is_own: bool | None = None) -> None:
    """Make a Plimsoll command import only the modules that the training of a job uses.

    Nothing changes for a job with user code, a quantized model, a teacher, several ranks, or allowed techniques. The
    memory of such a job is counted from the state before the training, so all its imports must happen earlier.

    Args:
        job: the job whose model will be built. Call this before torch is imported, because loaded modules stay.
        is_own: whether the process is a Plimsoll command; by default, whether it was started as ``plimsoll``.
    """
    is_done = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not is_done and (is_a_command() if is_own is None else is_own) and _has_known_imports(job):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection while the block runs imports, because it would take a sixth of the import time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_a_command() -> bool:
    """Return whether this process was started as ``plimsoll``, not as a program that imports it."""
    main = getattr(sys.modules.get("__main__"), "main", None)
    return getattr(main, "__module__", None) == "plimsoll.cli.main"


def _has_known_imports(job: Job) -> bool:
    augment = job.data.augment
    has_own_code = is_own_function(job.model) or bool(augment and (augment.function or augment.token_function))
    is_quantized = isinstance(job.model, str) and _is_quantized(Path(job.model))
    has_others = job.quantization_aware or job.distill or job.ranks > 1 or is_quantized
    return not (has_own_code or has_others or job.allow)


def _is_quantized(folder: Path) -> bool:
    """Return whether a checkpoint is quantized. If it is unreadable, return False: loading the model will fail."""
    with suppress(OSError, ValueError):
        return "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return False


class _Finder(MetaPathFinder):
    """Import hook for the compiler and for the module in which transformers checks for installed packages."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module, with the loader of this hook.

        Returns ``None`` for every module except the compiler and the module in which transformers checks for packages.
        """
        if name not in {COMPILER, _INSTALLED}:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = Deferring(spec.loader) if name == COMPILER else _Asking(spec.loader)
        return spec


class _Asking(Loader):
    """Loader for the module in which transformers checks for installed packages."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and make its cached checks report that the hidden packages are not installed."""
        import torch.distributed

        self._loader.exec_module(module)
        if hasattr(module, _LOOKS_THROUGH):
            setattr(module, _LOOKS_THROUGH, _once(getattr(module, _LOOKS_THROUGH)))
        if hasattr(module, _READS):
            setattr(module, _READS, _from_the_end(getattr(module, _READS)))
        # Transformers caches the answers and behaves as if these packages were not installed. Other modules can still
        # import them.
        with _hidden(_HIDDEN):
            for name in _HIDDEN:
                _ask(module, f"is_{name}_available")
        is_available = torch.distributed.is_available
        torch.distributed.is_available = lambda: False  # this leaves out distributed tensors
        try:
            _ask(module, "is_torch_distributed_available")
        finally:
            torch.distributed.is_available = is_available


def _once(look_through: Callable[[str], Any]) -> Callable[[str | Path], Any]:
    """Cache the results of a function that reads a folder.

    Transformers reads the files of all its models twice.
    """
    known = cache(look_through)
    return lambda path: known(str(path).removesuffix("/__init__.py"))


def _from_the_end(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap the parser of ``__all__`` so that it gets only the end of a file, from ``__all__`` on.

    The parser would otherwise split all lines of 1600 files.
    """
    return lambda text: read(text[text.rfind("\n__all__") + 1 :])


def _ask(module: ModuleType, question: str) -> None:
    function = getattr(module, question, None)
    # Without a cache, the answer would change later, when some modules already rely on it.
    if function is not None and hasattr(function, "cache_info"):
        function()


@contextmanager
def _hidden(packages: Sequence[str]) -> Iterator[None]:
    """Hide packages from imports while the block runs. Python treats ``None`` in `sys.modules` as not installed."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)
