"""torch's compiler (`torch._dynamo`) put off until something needs it: tracing and training do not.

Fake tensors, optimizers and checkpoints import it, and so does transformers, though nothing is compiled: a second, and
with what it imports (inductor, distributed tensors) most of 60 MiB. Loaded by `Deferring`, the package and its module
``source`` are empty. The few attributes that tracing and training use have stand-ins with the same effect, also if the
process compiles later. Any other attribute, as `torch.compile` needs, runs the real modules, which then replace them.

Read in torch 2.13 and 2.14. Where another asks for more, the compiler runs as ever. Does NOT put off
`torch.fx.experimental.symbolic_shapes` (with sympy), which fake tensors do use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
_SOURCE = "torch._dynamo.source"
_APART = ("torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op")
"""Modules of the compiler that use nothing else of it: fake tensors import the one, transformers' masks the other."""


class _Deferred(ModuleType):
    """A module of the compiler's that has not run."""

    __compiler__: Deferring

    def __getattr__(self, name: str) -> Any:
        """Return a stand-in, or what there is when the module has run; a package has a ``__path__`` to its others."""
        is_plain = name.startswith("__") and (name != "__path__" or self.__name__ != COMPILER)
        if is_plain or "__compiler__" not in vars(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__compiler__.asked(self, name)


class Deferring(Loader):
    """Loads torch's compiler without running it, and runs it when something needs more of it than the stand-ins."""

    def __init__(self, loader: Loader) -> None:
        self._loaders = {COMPILER: loader}
        self._stand_ins: dict[str, dict[str, Any]] = {
            COMPILER: {
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
        vars(module)["__compiler__"] = self
        for name in (*_APART, _SOURCE):
            spec = PathFinder.find_spec(name, self._path)
            if spec is None or spec.loader is None:
                continue
            if name == _SOURCE:
                self._loaders[name], spec.loader = spec.loader, self
            inner = sys.modules[name] = module_from_spec(spec)
            if name == _SOURCE:
                vars(inner)["__compiler__"] = self
            else:
                spec.loader.exec_module(inner)
            setattr(module, name.rpartition(".")[2], inner)

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
        compiler = sys.modules[COMPILER]
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
        if name == COMPILER:
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
