import numpy as np
import torch
from torch import nn

text = open("data/anna.txt", "r").read()
chars = tuple(set(text))
char2int = {ch: i for i, ch in enumerate(chars)}
encoded = np.array([char2int[ch] for ch in text])


def get_batches(arr, batch_size, seq_length):
    n_batches = len(arr) // (batch_size * seq_length)
    arr = arr[: n_batches * batch_size * seq_length].reshape((batch_size, -1))
    for n in range(0, arr.shape[1], seq_length):
        x = arr[:, n : n + seq_length]
        y = np.roll(x, -1, axis=1)
        yield x, y


class CharLSTM(nn.Module):
    def __init__(self, n_chars, n_hidden=512, n_layers=2):
        super().__init__()
        self.n_layers, self.n_hidden = n_layers, n_hidden
        self.emb = nn.Embedding(n_chars, 64)
        self.lstm = nn.LSTM(64, n_hidden, n_layers, batch_first=True, dropout=0.5)
        self.fc = nn.Linear(n_hidden, n_chars)

    def forward(self, x, hidden):
        r, hidden = self.lstm(self.emb(x), hidden)
        return self.fc(r.contiguous().view(-1, self.n_hidden)), hidden

    def init_hidden(self, bs):
        w = next(self.parameters()).data
        return (w.new(self.n_layers, bs, self.n_hidden).zero_(), w.new(self.n_layers, bs, self.n_hidden).zero_())


def train(net, data, epochs=10, batch_size=10, seq_length=50, lr=0.001, clip=5, val_frac=0.1):
    net.train()
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    val_idx = int(len(data) * (1 - val_frac))
    data, val_data = data[:val_idx], data[val_idx:]
    net.cuda()
    for e in range(epochs):
        h = net.init_hidden(batch_size)
        for x, y in get_batches(data, batch_size, seq_length):
            inputs, targets = torch.from_numpy(x).cuda(), torch.from_numpy(y).cuda()
            net.zero_grad()
            output, h = net(inputs, h)
            loss = criterion(output, targets.view(batch_size * seq_length))
            loss.backward(retain_graph=True)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
        val_h = net.init_hidden(batch_size)
        val_losses = []
        net.eval()
        for x, y in get_batches(val_data, batch_size, seq_length):
            val_h = tuple([each.data for each in val_h])
            inputs, targets = torch.from_numpy(x).cuda(), torch.from_numpy(y).cuda()
            output, val_h = net(inputs, val_h)
            val_loss = criterion(output, targets.view(batch_size * seq_length))
            val_losses.append(val_loss.item())
        net.train()
        print("Epoch {}/{} Val Loss: {:.4f}".format(e + 1, epochs, np.mean(val_losses)))


net = CharLSTM(len(chars))
train(net, encoded)
