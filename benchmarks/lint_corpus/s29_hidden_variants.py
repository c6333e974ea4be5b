import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, v, h):
        super().__init__()
        self.e = nn.Embedding(v, h)
        self.r = nn.LSTM(h, h, batch_first=True)
        self.o = nn.Linear(h, v)
        self.hidden = None

    def forward(self, x, hc=None):
        y, hc = self.r(self.e(x), hc)
        return self.o(y), hc


def train_tuple(net, loader, opt, crit):
    h = torch.zeros(1, 32, 128).cuda()
    c = torch.zeros(1, 32, 128).cuda()
    for x, y in loader:
        opt.zero_grad()
        out, (h, c) = net(x.cuda(), (h, c))
        loss = crit(out.transpose(1, 2), y.cuda())
        loss.backward(retain_graph=True)
        opt.step()


def train_ok(net, loader, opt, crit):
    h = torch.zeros(1, 32, 128).cuda()
    c = torch.zeros(1, 32, 128).cuda()
    for x, y in loader:
        opt.zero_grad()
        out, (h, c) = net(x.cuda(), (h, c))
        h = h.detach()
        c = c.detach()
        loss = crit(out.transpose(1, 2), y.cuda())
        loss.backward()
        opt.step()


def train_ok_inplace(net, loader, opt, crit):
    hidden = None
    for x, y in loader:
        if hidden is not None:
            for s in hidden:
                s.detach_()
        out, hidden = net(x, hidden)
        loss = crit(out.transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


def train_none(net, loader, opt, crit):
    hidden = None
    for step, (x, y) in enumerate(loader):
        net.zero_grad()
        output, hidden = net(x, hidden)
        loss = crit(output.transpose(1, 2), y)
        loss.backward()
        opt.step()


def train_fresh(net, loader, opt, crit):
    for x, y in loader:
        hidden = None
        logits = []
        for t in range(x.size(1)):
            out, hidden = net(x[:, t : t + 1], hidden)
            logits.append(out)
        loss = crit(torch.cat(logits, 1).transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
