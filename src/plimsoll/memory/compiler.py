"""Deferred loading of torch's compiler (`torch._dynamo`), which tracing and training do not need.

Fake tensors, optimizers, checkpoints and transformers import the compiler although nothing is compiled. Together with
inductor and distributed tensors, this takes a second and up to 60 MiB. `Deferring` loads the package and its module
``source`` empty. For the few attributes that tracing and training use, it provides stand-ins, which stay valid if the
process compiles later. A request for any other attribute, for example by `torch.compile`, runs the real modules, which
then replace the empty ones.

Written for torch 2.13 and 2.14. If another version needs more attributes, the compiler runs as usual. Does NOT defer
`torch.fx.experimental.symbolic_shapes` (with sympy), which fake tensors use.
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
"""Independent modules of the compiler: fake tensors import the first, masks of transformers import the second."""


class _Deferred(ModuleType):
    """A module of the compiler that has not run yet."""

    __compiler__: Deferring

    def __getattr__(self, name: str) -> Any:
        """Return the stand-in for an attribute, or else run the compiler and return the real attribute.

        Of the names with two leading underscores, only the package's ``__path__`` exists, which locates submodules.
        """
        is_plain = name.startswith("__") and (name != "__path__" or self.__name__ != COMPILER)
        if is_plain or "__compiler__" not in vars(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__compiler__.asked(self, name)


class Deferring(Loader):
    """Loader of torch's compiler that runs it only when an attribute without a stand-in is requested."""

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
        """Create a module that runs later."""
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run only the modules of the compiler that do not depend on its other modules."""
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
        """Return the stand-in for an attribute; if there is no stand-in or the compiler has run, the real attribute."""
        with self._lock:
            if not self._is_needed and name in self._stand_ins[module.__name__]:
                return self._stand_ins[module.__name__][name]
            self._need()
            self._run(module.__name__)
        return ModuleType.__getattribute__(module, name)

    def _need(self) -> ModuleType:
        """Run the deferred modules unless they have run, and return the package ``torch._dynamo``."""
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
        if loader is None:  # it has run, or is running
            return
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = loader
        if name == COMPILER:
            module.__path__ = self._path
        loader.exec_module(module)
        del vars(module)["__compiler__"]
        module.__class__ = ModuleType

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a wrapper that calls the function, and once the compiler has run, its uncompiled version."""
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
        """Stand in for ``graph_break``: until the compiler has run, there is no graph to break."""
        if self._is_needed:
            self._need().graph_break(*args, **kwargs)

    def _mark(self, mark: str, function: Any) -> Any:
        """Apply a decorator of the compiler, such as ``allow_in_graph``, to a function, and return the function.

        ``mark`` is the name of the decorator. If the compiler has not run yet, the decorator is applied when it runs.
        """
        if self._is_needed:
            return getattr(self._need(), mark)(function)
        self._marked.append((mark, function))
        return function


class _ConstantSource:
    """Stand-in for the source of a fake tensor with fixed sizes. It is never read."""

    def __init__(self, source_name: str) -> None:
        self.source_name = source_name


class _RandomValueSource:
    """Stand-in for a class that is not instantiated without compilation."""
