"""Names that torch does not have, although they are often recommended.

The list is fixed; a test checks that the installed torch has none of these names. Other unknown names are not reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source

_INVENTED = {
    "torch.cuda.pin_memory": "tensor.pin_memory(), or DataLoader(..., pin_memory=True)",
    "torch.cuda.clear_cache": "torch.cuda.empty_cache()",
    "torch.cuda.clear_memory": "torch.cuda.empty_cache()",
    "torch.cuda.clear_memory_allocated": "torch.cuda.reset_peak_memory_stats()",
    "torch.cuda.free_memory": "torch.cuda.empty_cache()",
    "torch.cuda.release_memory": "torch.cuda.empty_cache()",
    "torch.cuda.collect": "gc.collect(), or torch.cuda.ipc_collect()",
    "torch.cuda.garbage_collect": "gc.collect()",
    "torch.cuda.memory_free": "torch.cuda.mem_get_info()[0]",
    "torch.cuda.total_memory": "torch.cuda.get_device_properties(0).total_memory",
    "torch.cuda.get_memory_info": "torch.cuda.mem_get_info()",
    "torch.cuda.memory_info": "torch.cuda.mem_get_info()",
    "torch.cuda.set_memory_limit": "torch.cuda.set_per_process_memory_fraction(share)",
    "torch.cuda.set_memory_fraction": "torch.cuda.set_per_process_memory_fraction(share)",
    "torch.cuda.set_max_memory": "torch.cuda.set_per_process_memory_fraction(share)",
    "torch.cuda.max_memory_used": "torch.cuda.max_memory_allocated()",
    "torch.cuda.peak_memory_allocated": "torch.cuda.max_memory_allocated()",
    "torch.cuda.checkpoint": "torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)",
    "torch.empty_cache": "torch.cuda.empty_cache()",
    "torch.clear_cache": "torch.cuda.empty_cache()",
    "torch.gc": "gc.collect()",
    "torch.no_gradient": "torch.no_grad()",
    "torch.checkpoint": "torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)",
    "torch.nn.checkpoint": "torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)",
    "torch.nn.utils.checkpoint": "torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)",
    "torch.nn.utils.gradient_checkpointing": "torch.utils.checkpoint.checkpoint(function, *inputs)",
    "torch.utils.gradient_checkpointing": "torch.utils.checkpoint",
    "torch.optim.Adam8bit": "bitsandbytes.optim.Adam8bit, or torchao.optim.AdamW8bit",
    "torch.optim.AdamW8bit": "torchao.optim.AdamW8bit",
    "torch.optim.Lion": "an optimizer that torch has, such as torch.optim.AdamW",
    "torch.cuda.amp.GradientScaler": "torch.amp.GradScaler",
    "torch.amp.GradientScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.initialize": "torch.amp.autocast and torch.amp.GradScaler",
    "torch.quantization.quantize_8bit": "torchao.quantization.quantize_",
    "torch.utils.data.BucketIterator": "a batch sampler of lengths (torchtext's BucketIterator is gone)",
    "torch.utils.data.StreamingDataset": "torch.utils.data.IterableDataset",
    "torch.utils.data.LazyDataset": "torch.utils.data.Dataset that reads in __getitem__",
    "torch.utils.data.TextDataset": "torch.utils.data.Dataset",
}


def hits(source: Source) -> Iterator[Hit]:
    """Find uses and imports of names in the list."""
    for node in source.every(ast.Attribute):
        name = source.dotted(node)
        if name in _INVENTED:
            yield _hit(node, name)
    for statement in source.every(ast.ImportFrom):
        for alias in statement.names:
            name = f"{statement.module}.{alias.name}"
            if not statement.level and name in _INVENTED:
                yield _hit(statement, name)


def _hit(node: ast.expr | ast.stmt, name: str) -> Hit:
    return Hit(node, f"torch has no {name}", f"write {_INVENTED[name]}", severity="error")
