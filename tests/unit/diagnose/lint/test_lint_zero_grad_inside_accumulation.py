"""Gradients cleared while they should accumulate."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.zero_grad_inside_accumulation import hits

SNIPPETS = {
    "before-the-forward": r"""
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()  # <-
            loss = criterion(model(x), y) / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "after-the-condition": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
            optimizer.zero_grad()  # <-
    """,
    "of-the-model": r"""
        for i, batch in enumerate(loader):
            model.zero_grad()  # <-
            loss = model(**batch).loss / steps
            scaler.scale(loss).backward()
            if (i + 1) % accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
    """,
    "inner-loop": r"""
        for batch in loader:
            for micro_batch in batch.split(4):
                optimizer.zero_grad()  # <-
                loss = model(micro_batch).loss / 4
                loss.backward()
            optimizer.step()
    """,
    "right": r"""
        for i, batch in enumerate(loader):
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "right-at-the-first": r"""
        for i, batch in enumerate(loader):
            if i % 4 == 0:
                optimizer.zero_grad()
            loss = model(**batch).loss / 4
            loss.backward()
            if i % 4 == 3:
                optimizer.step()
    """,
    "right-outside": r"""
        for step in range(100):
            optimizer.zero_grad()
            for micro_step in range(4):
                loss = model(next(batches)) / 4
                loss.backward()
            optimizer.step()
    """,
    "no-accumulation": r"""
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """,
    "log-every-n": r"""
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            if (i + 1) % 100 == 0:
                print(loss.item())
    """,
    "accelerate-without-its-counting": r"""
        for i, batch in enumerate(loader):
            optimizer.zero_grad()  # <-
            accelerator.backward(model(**batch).loss)
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "accelerate-counts": r"""
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    """,
    "critic-of-a-gan": r"""
        for i, real in enumerate(loader):
            optimizer_D.zero_grad()
            d_loss = -critic(real).mean()
            d_loss.backward()
            optimizer_D.step()
            if i % n_critic == 0:
                optimizer_G.zero_grad()
                g_loss = -critic(generator(z)).mean()
                g_loss.backward()
                optimizer_G.step()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
