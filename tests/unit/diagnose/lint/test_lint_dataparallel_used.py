"""Models wrapped in DataParallel."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.dataparallel_used import hits

SNIPPETS = {
    "module": r"""
        import torch.nn as nn
        model = nn.DataParallel(model)  # <-
    """,
    "full-name": r"""
        import torch
        model = torch.nn.DataParallel(model, device_ids=[0, 1]).cuda()  # <-
    """,
    "imported": r"""
        from torch.nn import DataParallel
        model = DataParallel(model)  # <-
    """,
    "functional": r"""
        import torch.nn as nn
        y = nn.parallel.data_parallel(model, x, range(2))  # <-
    """,
    "asked-for": r"""
        import torch
        if isinstance(model, torch.nn.DataParallel):
            model = model.module
    """,
    "distributed": r"""
        from torch.nn.parallel import DistributedDataParallel
        model = DistributedDataParallel(model)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
