import torch
import torch.nn as nn
import torchtext
from torchtext.data import BucketIterator, Field, LabelField
from torchtext.datasets import IMDB
from torchtext.vocab import GloVe, vocab

TEXT = Field(tokenize="spacy", include_lengths=True)
LABEL = LabelField(dtype=torch.float)
train_data, test_data = IMDB.splits(TEXT, LABEL)
TEXT.build_vocab(train_data, max_size=25000, vectors="glove.6B.100d", unk_init=torch.Tensor.normal_)
LABEL.build_vocab(train_data)
device = torch.device("cuda")
train_it, test_it = BucketIterator.splits((train_data, test_data), batch_size=64, sort_within_batch=True, device=device)
vectors = torchtext.vocab.GloVe("840B", 300)
pretrained = vectors.get_vecs_by_tokens(TEXT.vocab.itos)


class RNN(nn.Module):
    def __init__(self, n, pad):
        super().__init__()
        self.embedding = nn.Embedding(n, 100, padding_idx=pad)
        self.rnn = nn.LSTM(100, 256, num_layers=2, bidirectional=True, dropout=0.5)
        self.fc = nn.Linear(512, 1)

    def forward(self, text, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(text), lengths.to("cpu"))
        out, (hidden, cell) = self.rnn(packed)
        hidden = torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)
        return self.fc(hidden)


def binary_accuracy(preds, y):
    return (torch.round(torch.sigmoid(preds)) == y).float().mean()


def train(model, iterator, optimizer, criterion):
    epoch_loss = 0
    epoch_acc = 0
    model.train()
    for batch in iterator:
        optimizer.zero_grad()
        text, lengths = batch.text
        predictions = model(text, lengths).squeeze(1)
        loss = criterion(predictions, batch.label)
        acc = binary_accuracy(predictions, batch.label)
        loss.backward()
        optimizer.step()
        epoch_loss += loss
        epoch_acc += acc
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


def evaluate(model, iterator, criterion):
    epoch_loss = 0
    model.eval()
    with torch.no_grad():
        for batch in iterator:
            text, lengths = batch.text
            predictions = model(text, lengths).squeeze(1)
            loss = criterion(predictions, batch.label)
            epoch_loss += loss
    return epoch_loss.item() / len(iterator)


model = RNN(len(TEXT.vocab), 1).to(device)
model.embedding.weight.data.copy_(pretrained)
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.BCEWithLogitsLoss().to(device)
best = float("inf")
for epoch in range(5):
    train_loss, train_acc = train(model, train_it, optimizer, criterion)
    valid_loss = evaluate(model, test_it, criterion)
    if valid_loss < best:
        best = valid_loss
        torch.save(model.state_dict(), "tut2-model.pt")
model.load_state_dict(torch.load("tut2-model.pt", weights_only=True, map_location="cpu"))
