"""Clipping of scaled gradients."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.unscale_missing_before_clip import hits

SNIPPETS = {
    "missing": r"""
        for x, y in loader:
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
            scaler.step(optimizer)
            scaler.update()
    """,
    "there": r"""
        for x, y in loader:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    """,
    "not-scaled": r"""
        for x, y in loader:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    """,
    "both-ways": r"""
        if use_amp:
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
            scaler.step(optimizer)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
