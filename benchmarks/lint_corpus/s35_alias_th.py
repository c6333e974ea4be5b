import torch as th
import torch.nn as N
import torch.nn.functional as F
from torch import cuda, load as tload
from torch.utils import data as td


class Corpus(td.Dataset):
    def __init__(self, fn, vocab):
        self.vocab = vocab
        self.sents = []
        for line in open(fn):
            self.sents.append([vocab[w] for w in line.split()])

    def __len__(self):
        return len(self.sents)

    def __getitem__(self, k):
        t = th.LongTensor(self.sents[k])
        if cuda.is_available():
            t = t.cuda()
        return t


def pad(xs):
    return N.utils.rnn.pad_sequence(xs, batch_first=True)


def fit(net, corpus, epochs=2):
    net = N.DataParallel(net).cuda()
    dl = td.DataLoader(corpus, 32, shuffle=True, collate_fn=pad)
    opt = th.optim.RMSprop(net.parameters(), lr=1e-3)
    best = 1e9
    for ep in range(epochs):
        tot = 0
        for x in dl:
            opt.zero_grad()
            y = net(x[:, :-1])
            nll = F.cross_entropy(y.transpose(1, 2), x[:, 1:])
            nll.backward()
            opt.step()
            tot = tot + nll
            cuda.empty_cache()
        if tot < best:
            best = tot
            th.save(net.module.state_dict(), "best.th")
    net.module.load_state_dict(tload("best.th"))
    return net


@th.no_grad()
def score(net, dl):
    net.eval()
    total = 0.0
    for x in dl:
        total += F.cross_entropy(net(x[:, :-1]).transpose(1, 2), x[:, 1:])
    return total / len(dl)
