"""Graphs that are retained, needed or not."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.retain_graph_true_unneeded import hits

SNIPPETS = {
    "only-one": r"""
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward(retain_graph=True)  # <-
            optimizer.step()
    """,
    "scaled": r"""
        for x, y in loader:
            loss = criterion(model(x), y)
            scaler.scale(loss).backward(retain_graph=True)  # <-
            scaler.step(optimizer)
    """,
    "the-last-of-two": r"""
        loss_a.backward(retain_graph=True)
        loss_b.backward(retain_graph=True)  # <-
    """,
    "two-of-one-graph": r"""
        for x, y in loader:
            h = encoder(x)
            loss_a, loss_b = a(h), b(h)
            loss_a.backward(retain_graph=True)
            loss_b.backward()
    """,
    "gradient-of-it-follows": r"""
        loss.backward(retain_graph=True)
        g = torch.autograd.grad(loss, x)
    """,
    "second-order": r"""
        loss.backward(retain_graph=True, create_graph=True)
    """,
    "without": r"""
        loss.backward(retain_graph=False)
        loss.backward()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
