"""Accumulated losses that are divided, and others that are not."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.accumulation_not_normalised import hits

SNIPPETS = {
    "never-divided": r"""
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            loss.backward()  # <-
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "scaled": r"""
        for i, batch in enumerate(loader):
            with torch.autocast("cuda"):
                loss = model(**batch).loss
            scaler.scale(loss).backward()  # <-
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """,
    "inner-loop": r"""
        for step in range(100):
            optimizer.zero_grad()
            for micro_step in range(gradient_accumulation_steps):
                loss = model(get_batch())
                loss.backward()  # <-
            optimizer.step()
    """,
    "divided": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            loss = loss / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "divided-in-place": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            loss /= accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
    """,
    "divided-in-the-call": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            (loss / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
    """,
    "divided-under-a-condition": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch)[0]
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if (i + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
    """,
    "divided-where-it-is-made": r"""
        def compute_loss(batch):
            return model(**batch).loss / accumulation_steps

        for i, batch in enumerate(loader):
            loss = compute_loss(batch)
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
    """,
    "sums-of-another-function": r"""
        def other():
            criterion = nn.CrossEntropyLoss(reduction="sum")

        def train():
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)
                loss.backward()  # <-
                if (i + 1) % 4 == 0:
                    optimizer.step()
    """,
    "sums": r"""
        criterion = nn.CrossEntropyLoss(reduction="sum")
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "the-library-divides": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "gradients-are-divided": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            loss.backward()
            if (i + 1) % 4 == 0:
                for p in model.parameters():
                    p.grad /= 4
                optimizer.step()
    """,
    "several-tasks": r"""
        for batch in loader:
            optimizer.zero_grad()
            for task in tasks:
                loss = model(batch, task).loss
                loss.backward()
            optimizer.step()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
