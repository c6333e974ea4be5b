"""Batches after the last full accumulation window."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.last_partial_accumulation_dropped import hits

SNIPPETS = {
    "classic": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0:  # <-
                optimizer.step()
                optimizer.zero_grad()
    """,
    "wrapped": r"""
        for step, batch in enumerate(tqdm(train_dataloader, desc="Iteration")):
            loss = model(**batch)[0]
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if (step + 1) % args.gradient_accumulation_steps == 0:  # <-
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
    """,
    "counter": r"""
        n = 0
        for batch in loader:
            loss = model(**batch).loss / accum_steps
            loss.backward()
            n += 1
            if n == accum_steps:  # <-
                optimizer.step()
                optimizer.zero_grad()
                n = 0
    """,
    "or-the-last": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    """,
    "behind-the-loop": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        if (i + 1) % 4:
            optimizer.step()
    """,
    "a-range-of-what-there-is": r"""
        for step in range(len(samples) // batch_size):
            loss = model(samples[step]) / 4
            loss.backward()
            if (step + 1) % 4 == 0:  # <-
                optimizer.step()
    """,
    "a-range": r"""
        for i in range(max_steps):
            loss = model(get_batch()) / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "a-name-for-it": r"""
        for i, batch in enumerate(loader):
            is_last = i + 1 == len(loader)
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0 or is_last:
                optimizer.step()
    """,
    "steps-always": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (i + 1) % 4 == 0:
                scheduler.step()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
