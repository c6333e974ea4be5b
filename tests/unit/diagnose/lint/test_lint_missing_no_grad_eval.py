"""Evaluation that records gradients."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.missing_no_grad_eval import hits

SNIPPETS = {
    "named-evaluate": r"""
        def evaluate(model, loader):
            model.eval()
            correct = 0
            for x, y in loader:
                logits = model(x)  # <-
                correct += (logits.argmax(-1) == y).sum().item()
            return correct
    """,
    "eval-in-the-loop-of-epochs": r"""
        for epoch in range(3):
            model.train()
            for x, y in train_loader:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
            model.eval()
            for x, y in val_loader:
                out = model(x)  # <-
    """,
    "by-the-loader": r"""
        for x, y in test_loader:
            pred = net(x)  # <-
            correct += (pred.argmax(1) == y).sum().item()
    """,
    "method": r"""
        class Trainer:
            def validate(self):
                self.model.eval()
                for batch in self.val_loader:
                    outputs = self.model(**batch)  # <-
                    self.metric.add(outputs.logits)
    """,
    "generation-by-hand": r"""
        def generate(decoder, start, length):
            hidden = decoder.init_hidden()
            for _ in range(length):
                output, hidden = decoder(start, hidden)  # <-
    """,
    "only-the-metric-in-no-grad": r"""
        def validate(model, val_loader):
            model.eval()
            for x, y in val_loader:
                logits = model(x)  # <-
                with torch.no_grad():
                    acc = (logits.argmax(-1) == y).float().mean()
    """,
    "with-no-grad": r"""
        def evaluate(model, loader):
            model.eval()
            with torch.no_grad():
                for x, y in loader:
                    logits = model(x)
    """,
    "inside-the-loop": r"""
        def evaluate(model, loader):
            model.eval()
            for x, y in loader:
                with torch.inference_mode():
                    logits = model(x)
    """,
    "decorated": r"""
        @torch.no_grad()
        def evaluate(model, loader):
            for x, y in loader:
                logits = model(x)
    """,
    "no-grad-with-autocast": r"""
        def evaluate(model, loader):
            model.eval()
            for x, y in loader:
                with torch.no_grad(), torch.autocast("cuda"):
                    logits = model(x)
    """,
    "switched-off": r"""
        def evaluate(model, loader):
            model.eval()
            torch.set_grad_enabled(False)
            for x, y in loader:
                logits = model(x)
    """,
    "by-phase": r"""
        for phase in ["train", "val"]:
            for x, y in loaders[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x)
    """,
    "callers-are-without": r"""
        def evaluate(model, loader):
            for x, y in loader:
                logits = model(x)

        with torch.no_grad():
            evaluate(model, loader)
    """,
    "trains": r"""
        def train(model, loader):
            model.train()
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
    """,
    "both-modes-in-one": r"""
        def run_epoch(model, loader, optimizer=None):
            for x, y in loader:
                loss = criterion(model(x), y)
                if optimizer is not None:
                    loss.backward()
    """,
    "lightning": r"""
        class Net(pl.LightningModule):
            def validation_step(self, batch, batch_idx):
                for part in batch:
                    out = self.model(part)
    """,
    "attack": r"""
        def evaluate_robustness(model, loader):
            model.eval()
            for x, y in loader:
                x.requires_grad_(True)
                loss = criterion(model(x), y)
                grad = torch.autograd.grad(loss, x)[0]
    """,
    "generate-has-its-own": r"""
        def evaluate(model, loader):
            model.eval()
            for batch in loader:
                ids = model.generate(batch["input_ids"])
    """,
    "test-function-of-pytest": r"""
        def test_model_is_deterministic():
            for seed in range(3):
                out = model(x)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
