"""What a command's process leaves out when torch and transformers are imported, because its job has no use for it.

    leave_out_unused(job)  # before torch is imported

Transformers takes torch's compiler along (`torch._dynamo`, with sympy, inductor and distributed tensors) and, where
they are installed, accelerate, scipy and torchao: a third of the time that imports take, and some 100 MiB of a budget.

- `torch._dynamo` is there and runs when it is needed. What torch and transformers ask of it although nothing is
  compiled has a stand-in that comes to the same; anything else, as `torch.compile`, runs all that was put off.
- Transformers is asked what is installed while those packages cannot be found, and keeps the answer: it is then as
  where they are not installed. Others import them as ever.

Where torch or transformers are laid out otherwise, more is imported. Does NOT change a program that imports Plimsoll,
nor a job of which it is not known what it imports (see `leave_out_unused`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial, update_wrapper
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plimsoll.records.job import Job

_COMPILER, _SOURCE = "torch._dynamo", "torch._dynamo.source"
_APART = ("torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op")
"""Modules of the compiler that use nothing else of it: fake tensors import the one, transformers' masks the other."""

_INSTALLED = "transformers.utils.import_utils"
"""Where transformers asks what is installed, in functions that `functools.lru_cache` keeps the answers of."""
_HIDDEN = ("accelerate", "scipy", "sklearn", "torchao")
_IMPORTING_TECHNIQUES = {"lora", "low_bit_optimizer"}


def leave_out_unused(job: Job) -> None:
    """Have this process import no more for a job than its training uses.

    A job with code of the user's, a quantized model, a teacher, several ranks, or a technique that imports more changes
    nothing: memory is counted from what is there before the training, so all of it has to be.

    Args:
        job: whose model is to be built. To be called before torch is imported: what is there stays.
    """
    if _has_known_imports(job) and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _has_known_imports(job: Job) -> bool:
    augment, folder = job.data.augment, Path(job.model) if isinstance(job.model, str) else None
    has_own_code = folder is not None and ":" in folder.name and not folder.is_dir()
    has_own_code = has_own_code or bool(augment and (augment.function or augment.token_function))
    has_others = job.quantization_aware or job.distill or job.ranks > 1 or (folder is not None and _is_quantized(folder))
    named = {*job.allow, *(pin.partition("=")[0] for pin in job.pin)}
    return not (has_own_code or has_others or named & _IMPORTING_TECHNIQUES)


def _is_quantized(folder: Path) -> bool:
    """Whether a checkpoint says so; who loads the model says what is wrong with one that cannot be read."""
    with suppress(OSError, ValueError):
        return "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return False


class _Finder(MetaPathFinder):
    """Finds the two modules that are loaded otherwise here."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module where it is, and have it loaded by a loader of ours."""
        if name not in {_COMPILER, _INSTALLED}:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Compiler(spec.loader) if name == _COMPILER else _Asking(spec.loader)
        return spec


class _Asking(Loader):
    """Loads the module in which transformers asks what is installed, and asks for what is to be left out."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and have it keep that the hidden packages are not there."""
        import torch.distributed

        self._loader.exec_module(module)
        with _hidden(_HIDDEN):
            for name in _HIDDEN:
                _ask(module, f"is_{name}_available")
        is_available = torch.distributed.is_available
        torch.distributed.is_available = lambda: False  # with it go distributed tensors
        try:
            _ask(module, "is_torch_distributed_available")
        finally:
            torch.distributed.is_available = is_available


def _ask(module: ModuleType, question: str) -> None:
    function = getattr(module, question, None)
    if hasattr(function, "cache_info"):  # else it would answer otherwise later, when half of the modules rely on it
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


class _Deferred(ModuleType):
    """A module of the compiler's that has not run."""

    __compiler__: _Compiler

    def __getattr__(self, name: str) -> Any:
        """Return a stand-in, or what there is when the module has run; a package has a ``__path__`` to its others."""
        is_plain = name.startswith("__") and (name != "__path__" or self.__name__ != _COMPILER)
        if is_plain or "__compiler__" not in vars(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__compiler__.asked(self, name)


class _Compiler(Loader):
    """Loads torch's compiler without running it, and runs it when something needs more of it than the stand-ins."""

    def __init__(self, loader: Loader) -> None:
        self._loaders = {_COMPILER: loader}
        self._stand_ins: dict[str, dict[str, Any]] = {
            _COMPILER: {
                "disable": self._disable,
                "graph_break": self._graph_break,
                "allow_in_graph": partial(self._mark, "allow_in_graph"),
                "assume_constant_result": partial(self._mark, "assume_constant_result"),
            },
            _SOURCE: {"ConstantSource": _ConstantSource, "RandomValueSource": _RandomValueSource},
        }
        self._marked: list[tuple[str, Any]] = []
        self._path: list[str] = []
        self._is_needed = False
        self._lock = threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module that runs later."""
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run only those modules of the compiler's that use nothing else of it."""
        self._path = vars(module).pop("__path__")
        for name in (*_APART, _SOURCE):
            spec = PathFinder.find_spec(name, self._path)
            if spec is None or spec.loader is None:
                continue
            if name == _SOURCE:
                self._loaders[name], spec.loader = spec.loader, self
            inner = sys.modules[name] = module_from_spec(spec)
            if name != _SOURCE:
                spec.loader.exec_module(inner)
            setattr(module, name.rpartition(".")[2], inner)
        for name in self._loaders:
            vars(sys.modules[name])["__compiler__"] = self

    def asked(self, module: _Deferred, name: str) -> Any:
        """Return a stand-in where there is one and the compiler is not needed; else let it run, and ask it."""
        with self._lock:
            if not self._is_needed and name in self._stand_ins[module.__name__]:
                return self._stand_ins[module.__name__][name]
            self._need()
            self._run(module.__name__)
        return ModuleType.__getattribute__(module, name)

    def _need(self) -> ModuleType:
        """Run what was put off, the package first; in its course it asks for the other module, which runs then."""
        compiler = sys.modules[_COMPILER]
        with self._lock:
            if not self._is_needed:
                self._is_needed = True
                for name in tuple(self._loaders):
                    self._run(name)
                for mark, function in self._marked:
                    getattr(compiler, mark)(function)
        return compiler

    def _run(self, name: str) -> None:
        loader, module = self._loaders.pop(name, None), sys.modules[name]
        if loader is None:  # it has run, or is about to
            return
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = loader
        if name == _COMPILER:
            module.__path__ = self._path
        loader.exec_module(module)
        del vars(module)["__compiler__"]
        module.__class__ = ModuleType

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that is called as it is, and as the compiler would have it as soon as that is there."""
        if function is None:
            return partial(self._disable, recursive=recursive, **options)

        @cache
        def disabled() -> Callable[..., Any]:
            wrapped: Callable[..., Any] = self._need().disable(function, recursive, **options)
            return wrapped

        if not isinstance(function, FunctionType):
            return disabled()

        def call(*args: Any, **kwargs: Any) -> Any:
            return (disabled() if self._is_needed else function)(*args, **kwargs)

        return update_wrapper(call, function)

    def _graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no graph where nothing is compiled."""
        if self._is_needed:
            self._need().graph_break(*args, **kwargs)

    def _mark(self, mark: str, function: Any) -> Any:
        """Return the function, which is marked for the compiler when that is there."""
        if self._is_needed:
            return getattr(self._need(), mark)(function)
        self._marked.append((mark, function))
        return function


class _ConstantSource:
    """Where a fake tensor is from that has fixed sizes: nothing reads it."""

    def __init__(self, source_name: str) -> None:
        self.source_name = source_name


class _RandomValueSource:
    """What no fake tensor is from where nothing is compiled."""
