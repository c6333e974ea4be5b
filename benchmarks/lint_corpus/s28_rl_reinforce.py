"""REINFORCE for text generation: the log-probs and rewards lists are needed until the backward."""
import torch
from torch.distributions import Categorical


class Agent:
    def __init__(self, policy, lr=1e-3):
        self.policy = policy
        self.opt = torch.optim.Adam(policy.parameters(), lr=lr)
        self.saved_log_probs = []
        self.rewards = []

    def act(self, state):
        probs = self.policy(state)
        m = Categorical(probs)
        a = m.sample()
        self.saved_log_probs.append(m.log_prob(a))
        return a.item()

    def finish(self, gamma=0.99):
        R = 0
        policy_loss, returns = [], []
        for r in self.rewards[::-1]:
            R = r + gamma * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        for lp, R in zip(self.saved_log_probs, returns):
            policy_loss.append(-lp * R)
        self.opt.zero_grad()
        loss = torch.stack(policy_loss).sum()
        loss.backward()
        self.opt.step()
        del self.rewards[:]
        del self.saved_log_probs[:]
        return loss.item()


def decode(model, src, max_len=50):
    """autoregressive, differentiable: outputs are stacked and given back"""
    hidden = model.encode(src)
    token = torch.zeros(src.size(0), dtype=torch.long, device=src.device)
    outputs = []
    for _ in range(max_len):
        logits, hidden = model.step(token, hidden)
        outputs.append(logits)
        token = logits.argmax(-1)
    return torch.stack(outputs, 1)


def tbptt(model, opt, seq, chunk=32):
    state = None
    for i in range(0, seq.size(1) - 1, chunk):
        x, y = seq[:, i : i + chunk], seq[:, i + 1 : i + chunk + 1]
        if state is not None:
            state = tuple(s.detach() for s in state)
        out, state = model(x, state)
        loss = torch.nn.functional.cross_entropy(out.transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


def inner_steps(model, task, inner_lr=0.1, steps=3):
    """MAML"""
    fast = dict(model.named_parameters())
    for _ in range(steps):
        loss = torch.func.functional_call(model, fast, task.x).pow(2).mean()
        grads = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
        fast = {k: p - inner_lr * g for (k, p), g in zip(fast.items(), grads)}
    return fast


def fgm_training(model, loader, opt, fgm):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        fgm.attack()
        loss_adv = model(**batch).loss
        loss_adv.backward()
        fgm.restore()
        opt.step()
        opt.zero_grad()
