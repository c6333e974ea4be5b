"""Optimizers that have states before the model moves."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.optimizer_before_device_move import hits

SNIPPETS = {
    "adagrad": r"""
        model = Net()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        model.to("cuda")  # <-
    """,
    "adam-has-none-yet": r"""
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model.to("cuda")
    """,
    "right-order": r"""
        model = Net()
        model.cuda()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    """,
    "another-model": r"""
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        teacher_model.to("cuda")
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
