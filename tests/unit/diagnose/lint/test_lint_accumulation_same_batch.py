"""A batch that is computed several times."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.accumulation_same_batch import hits

SNIPPETS = {
    "range-without-use": r"""
        for inputs, labels in loader:
            for _ in range(accumulation_steps):  # <-
                loss = criterion(model(inputs), labels) / accumulation_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "with-a-dict": r"""
        for batch in loader:
            optimizer.zero_grad()
            for step in range(4):  # <-
                outputs = model(**batch)
                loss = outputs.loss / 4
                loss.backward()
            optimizer.step()
    """,
    "slices": r"""
        for inputs, labels in loader:
            for i in range(4):
                part = inputs[i * 8 : (i + 1) * 8]
                loss = criterion(model(part), labels[i * 8 : (i + 1) * 8]) / 4
                loss.backward()
            optimizer.step()
    """,
    "next": r"""
        for step in range(100):
            for _ in range(4):
                x, y = next(batches)
                loss = criterion(model(x), y) / 4
                loss.backward()
            optimizer.step()
    """,
    "epochs-on-one-batch": r"""
        for batch in loader:
            for _ in range(ppo_epochs):
                loss = policy_model(batch).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """,
    "chunks": r"""
        for batch in loader:
            for part in batch.chunk(4):
                loss = model(part).loss / 4
                loss.backward()
            optimizer.step()
    """,
    "noise": r"""
        for batch in loader:
            for _ in range(4):
                noisy = batch + torch.randn_like(batch)
                loss = model(noisy).mean() / 4
                loss.backward()
            optimizer.step()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
