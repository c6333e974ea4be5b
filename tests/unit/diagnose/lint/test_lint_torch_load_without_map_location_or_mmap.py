"""Calls of `torch.load` that do not name the device."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.torch_load_without_map_location_or_mmap import hits

SNIPPETS = {
    "plain": r"""
        import torch
        state = torch.load("model.pt")  # <-
        model.load_state_dict(torch.load(path, weights_only=True))  # <-
    """,
    "imported": r"""
        from torch import load
        state = load("model.pt")  # <-
    """,
    "with-a-place": r"""
        import torch
        torch.load("model.pt", map_location="cpu")
        torch.load("model.pt", device)
        torch.load("model.pt", mmap=True)
        torch.load("model.pt", **options)
    """,
    "another-load": r"""
        import json, numpy as np
        json.load(file)
        np.load("x.npy")
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
