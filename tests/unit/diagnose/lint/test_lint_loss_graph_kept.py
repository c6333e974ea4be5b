"""Losses and outputs that are collected with or without their graphs."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.loss_graph_kept import hits

SNIPPETS = {
    "sum-of-losses": r"""
        total = 0
        for batch in loader:
            loss = model(batch).loss
            loss.backward()
            total += loss  # <-
    """,
    "sum-written-out": r"""
        for epoch in range(3):
            running = 0.0
            for x, y in train_loader:
                loss = criterion(model(x), y)
                loss.backward()
                running = running + loss  # <-
    """,
    "weighted-sum": r"""
        for x, y in train_loader:
            loss = criterion(model(x), y)
            loss.backward()
            epoch_loss += loss * x.size(0)  # <-
    """,
    "mean-on-several-devices": r"""
        for x, y in train_loader:
            loss = criterion(model(x), y)
            loss = loss.mean()
            loss.backward()
            epoch_loss += loss / len(train_loader)  # <-
    """,
    "list-of-losses": r"""
        losses = []
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss)  # <-
    """,
    "dict-of-lists": r"""
        history = {"loss": []}
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            history["loss"].append(loss)  # <-
    """,
    "outputs-of-training": r"""
        all_outputs = []
        for x, y in train_loader:
            outputs = model(x)
            loss = criterion(outputs, y)
            loss.backward()
            all_outputs.append(outputs)  # <-
    """,
    "scaled": r"""
        for x, y in train_loader:
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            total_loss += loss  # <-
    """,
    "accelerator": r"""
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            total_loss += loss  # <-
    """,
    "evaluation-with-gradients": r"""
        def evaluate(model, loader):
            total = 0
            for x, y in loader:
                total += criterion(model(x), y)  # <-
            return total / len(loader)
    """,
    "through-a-function": r"""
        def train_step(x, y):
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for x, y in loader:
            loss = train_step(x, y)
            total += loss  # <-
    """,
    "attribute": r"""
        class Trainer:
            def fit(self):
                for x, y in self.loader:
                    loss = self.criterion(self.model(x), y)
                    loss.backward()
                    self.total_loss += loss  # <-
    """,
    "item": r"""
        for x, y in train_loader:
            loss = criterion(model(x), y)
            loss.backward()
            total += loss.item()
    """,
    "float-and-detach": r"""
        for x, y in train_loader:
            loss = criterion(model(x), y)
            loss.backward()
            total += float(loss)
            other += loss.detach()
            third += loss.data
            losses.append(loss.detach().cpu().numpy())
            more.append(loss.cpu().item())
    """,
    "rebound-to-a-number": r"""
        for x, y in train_loader:
            loss = criterion(model(x), y)
            loss.backward()
            loss = loss.item()
            total += loss
    """,
    "returned-as-a-number": r"""
        def train_step(x, y):
            loss = criterion(model(x), y)
            loss.backward()
            return loss.item()

        for x, y in loader:
            total += train_step(x, y)
    """,
    "one-of-two-returned": r"""
        def train_step(x, y):
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            return loss.item(), logits.argmax(-1)

        for x, y in loader:
            loss, guesses = train_step(x, y)
            total += loss
    """,
    "no-grad": r"""
        with torch.no_grad():
            for x, y in val_loader:
                total += criterion(model(x), y)
                outputs.append(model(x))
    """,
    "decorated": r"""
        @torch.inference_mode()
        def evaluate(model, loader):
            for x, y in loader:
                total += criterion(model(x), y)
    """,
    "terms-of-one-loss": r"""
        for x, y in train_loader:
            loss = 0
            for head in heads:
                loss += criterion(head(model(x)), y)
            loss.backward()
    """,
    "sum-that-goes-back": r"""
        for x, y in train_loader:
            outputs = model(x)
            total_loss = criterion(outputs, y)
            aux_loss = criterion(outputs, y)
            total_loss += aux_loss
            total_loss.backward()
    """,
    "time-steps": r"""
        def train(line, target):
            hidden = rnn.init_hidden()
            loss = 0
            for i in range(line.size(0)):
                output, hidden = rnn(line[i], hidden)
                loss += criterion(output, target[i])
            loss.backward()
            return loss.item()
    """,
    "forward-of-a-module": r"""
        class Net(nn.Module):
            def forward(self, x):
                outputs = []
                for step in range(10):
                    x = self.decoder(x)
                    outputs.append(x)
                return torch.stack(outputs)
    """,
    "collected-and-gone-back-from": r"""
        for batch in loader:
            losses = []
            for task in tasks:
                losses.append(criterion(model(batch, task), batch.y))
            sum(losses).backward()
    """,
    "a-number-beside-the-loss": r"""
        for batch in loader:
            loss, loss_node = loss_compute(model(batch), batch.y)
            loss_node.backward()
            total_loss += loss
    """,
    "gradients-have-no-graph": r"""
        for x in loader:
            score = model(x).sum()
            (gradient,) = torch.autograd.grad(score, x)
            maps.append(gradient.abs())
    """,
    "fed-back": r"""
        for t in steps:
            velocity = model(latents, t)
            latents = latents + velocity / len(steps)
    """,
    "forward-without-gradients-and-kept-behind-it": r"""
        for batch in loader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(outputs.loss)
    """,
    "gone-back-from-in-another-method": r"""
        class Trainer:
            def collect(self):
                for x in self.loader:
                    loss = self.model(x)
                    self.acc.append(loss)

            def update(self):
                torch.stack(self.acc).mean().backward()
    """,
    "numbers-of-something-else": r"""
        for batch in loader:
            count += len(batch)
            sizes.append(batch.size(0))
            loss = model(batch).loss
            loss.backward()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
