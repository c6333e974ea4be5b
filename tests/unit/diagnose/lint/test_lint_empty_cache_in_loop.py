"""Caches that are emptied in every batch."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.empty_cache_in_loop import hits

SNIPPETS = {
    "each-batch": r"""
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.cuda.empty_cache()  # <-
    """,
    "now-and-then": r"""
        for i, batch in enumerate(train_loader):
            model(batch).mean().backward()
            if i % 100 == 0:
                torch.cuda.empty_cache()  # <-
    """,
    "in-a-function-of-the-loop": r"""
        def process(batch):
            loss = model(batch).mean()
            loss.backward()
            torch.cuda.empty_cache()  # <-

        for batch in data_loader:
            process(batch)
    """,
    "evaluation": r"""
        with torch.no_grad():
            for text in texts:
                out = model(text)
                torch.cuda.empty_cache()  # <-
    """,
    "imported": r"""
        from torch.cuda import empty_cache
        for batch in loader:
            model(batch).mean().backward()
            empty_cache()  # <-
    """,
    "once": r"""
        del model
        torch.cuda.empty_cache()
    """,
    "each-epoch": r"""
        for epoch in range(3):
            for batch in loader:
                model(batch).mean().backward()
            torch.cuda.empty_cache()
    """,
    "each-training": r"""
        def train(seed):
            for batch in loader:
                model(batch).mean().backward()
            torch.cuda.empty_cache()

        for seed in range(3):
            train(seed)
    """,
    "a-model-that-goes": r"""
        for name in names:
            model = build(name)
            out = model(x)
            del model
            torch.cuda.empty_cache()
    """,
    "after-an-oom": r"""
        for batch in loader:
            try:
                model(batch).mean().backward()
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
    """,
    "a-model-each": r"""
        for name in names:
            model = AutoModel.from_pretrained(name)
            out = model(x)
            del model
            torch.cuda.empty_cache()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
