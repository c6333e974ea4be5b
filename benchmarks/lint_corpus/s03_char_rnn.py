# https://github.com/someone/char-rnn.pytorch
import argparse
import random
import string
import time

import torch
import torch.nn as nn
import unidecode

all_characters = string.printable
n_characters = len(all_characters)


def read_file(filename):
    file = unidecode.unidecode(open(filename).read())
    return file, len(file)


class CharRNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size, n_layers=1):
        super().__init__()
        self.hidden_size = hidden_size
        self.n_layers = n_layers
        self.encoder = nn.Embedding(input_size, hidden_size)
        self.rnn = nn.GRU(hidden_size, hidden_size, n_layers)
        self.decoder = nn.Linear(hidden_size, output_size)

    def forward(self, inp, hidden):
        encoded = self.encoder(inp)
        output, hidden = self.rnn(encoded.view(1, inp.size(0), -1), hidden)
        return self.decoder(output.view(inp.size(0), -1)), hidden

    def init_hidden(self, batch_size):
        return torch.zeros(self.n_layers, batch_size, self.hidden_size)


parser = argparse.ArgumentParser()
parser.add_argument("filename", type=str)
parser.add_argument("--n_epochs", type=int, default=2000)
parser.add_argument("--chunk_len", type=int, default=200)
parser.add_argument("--batch_size", type=int, default=100)
args = parser.parse_args()
file, file_len = read_file(args.filename)


def random_training_set(chunk_len, batch_size):
    inp = torch.LongTensor(batch_size, chunk_len)
    target = torch.LongTensor(batch_size, chunk_len)
    for bi in range(batch_size):
        start = random.randint(0, file_len - chunk_len - 1)
        chunk = file[start : start + chunk_len + 1]
        inp[bi] = torch.tensor([all_characters.index(c) for c in chunk[:-1]])
        target[bi] = torch.tensor([all_characters.index(c) for c in chunk[1:]])
    return inp.cuda(), target.cuda()


def train(inp, target):
    hidden = decoder.init_hidden(args.batch_size).cuda()
    decoder.zero_grad()
    loss = 0
    for c in range(args.chunk_len):
        output, hidden = decoder(inp[:, c], hidden)
        loss += criterion(output.view(args.batch_size, -1), target[:, c])
    loss.backward()
    decoder_optimizer.step()
    return loss.data / args.chunk_len


def generate(decoder, prime_str="A", predict_len=100):
    hidden = decoder.init_hidden(1).cuda()
    inp = torch.tensor([all_characters.index(prime_str)]).cuda()
    predicted = prime_str
    with torch.no_grad():
        for _ in range(predict_len):
            output, hidden = decoder(inp, hidden)
            top_i = torch.multinomial(output.data.view(-1).div(0.8).exp(), 1)[0]
            predicted += all_characters[top_i]
            inp = top_i.view(1)
    return predicted


decoder = CharRNN(n_characters, 100, n_characters, 2).cuda()
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
start = time.time()
all_losses = []
loss_avg = 0
for epoch in range(1, args.n_epochs + 1):
    loss = train(*random_training_set(args.chunk_len, args.batch_size))
    loss_avg += loss
    if epoch % 100 == 0:
        print("[%s (%d) %.4f]" % (time.time() - start, epoch, loss))
        print(generate(decoder, "Wh", 100))
        all_losses.append(loss_avg / 100)
        loss_avg = 0
