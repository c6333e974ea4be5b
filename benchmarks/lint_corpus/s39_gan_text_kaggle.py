import torch
from torch import nn, autograd, optim
from torch.utils.data import DataLoader

lines = open("poems.txt", encoding="utf-8").readlines()
charset = sorted(set("".join(lines)))
netG, netD = make_nets(len(charset))
netG.cuda(); netD.cuda()
optD = optim.Adam(netD.parameters(), lr=1e-4, betas=(0.5, 0.9))
optG = optim.Adam(netG.parameters(), lr=1e-4, betas=(0.5, 0.9))
one = torch.tensor(1.0).cuda()
mone = -one
D_losses, G_losses, samples = [], [], []


def calc_gradient_penalty(netD, real, fake):
    alpha = torch.rand(real.size(0), 1, 1).expand(real.size()).cuda()
    inter = autograd.Variable(alpha * real + (1 - alpha) * fake, requires_grad=True)
    d = netD(inter)
    g = autograd.grad(outputs=d, inputs=inter, grad_outputs=torch.ones_like(d), create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((g.norm(2, dim=1) - 1) ** 2).mean() * 10


def inf_train_gen():
    while True:
        for i in range(0, len(lines) - 63, 64):
            yield torch.stack([encode(l) for l in lines[i : i + 64]]).cuda()


data = inf_train_gen()
for iteration in range(200000):
    for p in netD.parameters():
        p.requires_grad = True
    for iter_d in range(10):
        real = next(data)
        netD.zero_grad()
        D_real = netD(real).mean()
        D_real.backward(mone)
        noise = torch.randn(64, 128).cuda()
        with torch.no_grad():
            fake = netG(noise)
        D_fake = netD(fake).mean()
        D_fake.backward(one)
        gp = calc_gradient_penalty(netD, real.data, fake.data)
        gp.backward()
        D_cost = D_fake - D_real + gp
        optD.step()
    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    G = netD(netG(torch.randn(64, 128).cuda())).mean()
    G.backward(mone)
    optG.step()
    D_losses.append(D_cost)
    G_losses.append(-G)
    if iteration % 100 == 99:
        with torch.no_grad():
            samples.append(netG(torch.randn(64, 128).cuda()).argmax(-1).cpu())
        torch.save(netG.state_dict(), "g.pt")
