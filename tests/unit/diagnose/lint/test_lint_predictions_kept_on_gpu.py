"""Outputs that are collected on the GPU or elsewhere."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.predictions_kept_on_gpu import hits

SNIPPETS = {
    "list": r"""
        model.to("cuda")
        with torch.no_grad():
            for x, y in loader:
                all_logits.append(model(x))  # <-
    """,
    "concatenated": r"""
        model.cuda()
        preds = None
        with torch.no_grad():
            for x, y in loader:
                logits = model(x.cuda())
                preds = logits if preds is None else preds
                preds = torch.cat((preds, logits))  # <-
    """,
    "arg-max": r"""
        with torch.no_grad():
            for x, y in loader:
                out = model(x.to(device))
                guesses = torch.argmax(out, dim=-1)
                all_guesses.append(guesses)  # <-
    """,
    "detached-in-training": r"""
        for x, y in loader:
            out = model(x.to(device))
            criterion(out, y).backward()
            train_outputs.append(out.detach())  # <-
    """,
    "moved": r"""
        with torch.no_grad():
            for x, y in loader:
                out = model(x.to(device))
                all_logits.append(out.cpu())
                more.append(out.detach().cpu().numpy())
                ids.extend(out.argmax(-1).tolist())
                last.append(out.to("cpu"))
    """,
    "kept-behind-the-block": r"""
        for batch in loader:
            with torch.no_grad():
                outputs = model(**batch.to(device))
            keep.append(outputs.logits)  # <-
    """,
    "one-number": r"""
        with torch.no_grad():
            for x, y in loader:
                accuracies.append((model(x.to(device)).argmax(1) == y).float().mean())
    """,
    "a-list-for-each-batch": r"""
        with torch.no_grad():
            for x, y in loader:
                parts = []
                for part in x.to(device).split(4):
                    parts.append(model(part))
                metric.update(torch.cat(parts), y)
    """,
    "no-device": r"""
        with torch.no_grad():
            for x, y in loader:
                logits.append(model(x))
    """,
    "losses": r"""
        with torch.no_grad():
            for x, y in loader:
                losses.append(criterion(model(x.to(device)), y))
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
