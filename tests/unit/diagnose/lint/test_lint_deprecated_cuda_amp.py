"""torch.cuda.amp."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.deprecated_cuda_amp import hits

SNIPPETS = {
    "imported": r"""
        from torch.cuda.amp import GradScaler, autocast  # <-
        scaler = GradScaler()  # <-
        for x in loader:
            with autocast():  # <-
                y = model(x)
    """,
    "full-name": r"""
        import torch
        scaler = torch.cuda.amp.GradScaler(enabled=True)  # <-
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):  # <-
            pass
    """,
    "module": r"""
        from torch.cuda import amp  # <-
        scaler = amp.GradScaler()  # <-
    """,
    "decorator": r"""
        from torch.cuda.amp import custom_fwd  # <-
        class F(torch.autograd.Function):
            @staticmethod
            @custom_fwd  # <-
            def forward(ctx, x):
                return x
    """,
    "new": r"""
        from torch.amp import GradScaler, autocast
        scaler = GradScaler("cuda")
        with torch.autocast("cuda"):
            pass
    """,
    "fallback": r"""
        try:
            from torch.amp import GradScaler
        except ImportError:
            from torch.cuda.amp import GradScaler
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
