"""Recurrent states that are carried with their graph."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.hidden_state_not_detached import hits

SNIPPETS = {
    "language-model": r"""
        hidden = model.init_hidden(batch_size)
        for x, y in loader:
            output, hidden = model(x, hidden)  # <-
            loss = criterion(output, y)
            loss.backward()
            optimizer.step()
    """,
    "lstm-pair": r"""
        h, c = init()
        for x, y in loader:
            out, (h, c) = lstm(x, (h, c))  # <-
            loss = criterion(out, y)
            loss.backward()
    """,
    "range-over-chunks": r"""
        hidden = None
        for i in range(0, data.size(0), bptt):
            x, y = get_batch(data, i)
            output, hidden = rnn(x, hidden)  # <-
            loss = criterion(output, y)
            loss.backward(retain_graph=True)
            optimizer.step()
    """,
    "module": r"""
        class Net(nn.Module):
            def __init__(self):
                self.lstm = nn.LSTM(3, 3)
                self.hidden = None

            def forward(self, x):
                out, self.hidden = self.lstm(x, self.hidden)  # <-
                return out
    """,
    "detached": r"""
        for x, y in loader:
            hidden = hidden.detach()
            output, hidden = model(x, hidden)
            criterion(output, y).backward()
    """,
    "detached-in-a-tuple": r"""
        for x, y in loader:
            hidden = tuple(h.detach() for h in hidden)
            output, hidden = model(x, hidden)
            criterion(output, y).backward()
    """,
    "repackaged": r"""
        for x, y in loader:
            hidden = repackage_hidden(hidden)
            output, hidden = model(x, hidden)
            criterion(output, y).backward()
    """,
    "in-place": r"""
        for x, y in loader:
            hidden[0].detach_()
            hidden[1].detach_()
            output, hidden = model(x, hidden)
            criterion(output, y).backward()
    """,
    "new-for-each-batch": r"""
        for x, y in loader:
            hidden = model.init_hidden(x.size(0))
            output, hidden = model(x, hidden)
            criterion(output, y).backward()
    """,
    "time-steps-of-one-text": r"""
        def train(text, target):
            hidden = rnn.init_hidden()
            loss = 0
            for i in range(len(text)):
                output, hidden = rnn(text[i], hidden)
                loss += criterion(output, target[i])
            loss.backward()
    """,
    "module-with-a-reset": r"""
        class Net(nn.Module):
            def reset(self):
                self.hidden = None

            def forward(self, x):
                out, self.hidden = self.lstm(x, self.hidden)
                return out
    """,
    "module-that-detaches": r"""
        class Net(nn.Module):
            def forward(self, x):
                out, self.hidden = self.lstm(x, self.hidden)
                self.hidden = self.hidden.detach()
                return out
    """,
    "evaluation": r"""
        with torch.no_grad():
            for x, y in loader:
                output, hidden = model(x, hidden)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
