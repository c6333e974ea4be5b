"""Checkpoints that stay on the device."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.optimizer_state_kept_on_gpu_after_resume import hits

SNIPPETS = {
    "script": r"""
        import torch
        checkpoint = torch.load("last.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])  # <-
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
    """,
    "onto-the-device": r"""
        import torch
        def main():
            ckpt = torch.load(path, map_location=device)
            optimizer.load_state_dict(ckpt["optimizer_state_dict"])  # <-
            for epoch in range(3):
                train(model, loader, optimizer)

        def train(model, loader, optimizer):
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
    """,
    "on-the-host": r"""
        import torch
        checkpoint = torch.load("last.pt", map_location="cpu")
        optimizer.load_state_dict(checkpoint["optimizer"])
        for x, y in loader:
            criterion(model(x), y).backward()
    """,
    "deleted": r"""
        import torch
        checkpoint = torch.load("last.pt")
        optimizer.load_state_dict(checkpoint["optimizer"])
        del checkpoint
        for x, y in loader:
            criterion(model(x), y).backward()
    """,
    "in-a-function-of-its-own": r"""
        import torch
        def resume(path):
            checkpoint = torch.load(path)
            optimizer.load_state_dict(checkpoint["optimizer"])

        resume("last.pt")
        for x, y in loader:
            criterion(model(x), y).backward()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
