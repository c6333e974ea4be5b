"""Names that torch does not have."""

from pkgutil import resolve_name

import pytest

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.unknown_torch_name import _INVENTED, hits

SNIPPETS = {
    "pin-memory": r"""
        import torch
        batch = torch.cuda.pin_memory(batch)  # <-
    """,
    "cache": r"""
        import torch
        torch.cuda.clear_cache()  # <-
    """,
    "imported": r"""
        from torch.utils.data import BucketIterator  # <-
    """,
    "those-it-has": r"""
        import torch
        torch.cuda.empty_cache()
        torch.cuda.memory.memory_summary()
        batch = batch.pin_memory()
    """,
    "somebody-elses": r"""
        from mine import torch_tools as tools
        tools.cuda.pin_memory(batch)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)


@pytest.mark.parametrize("name", _INVENTED)
def test_torch_really_has_no_such_name(name):
    with pytest.raises((ImportError, AttributeError)):
        resolve_name(name)
