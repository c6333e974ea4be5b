import torch
import torch.nn as nn
import torch.optim as optim

from discriminator import Discriminator
from generator import Generator
from helpers import prepare_discriminator_data, prepare_generator_batch

CUDA = torch.cuda.is_available()
BATCH_SIZE = 32
POS_NEG_SAMPLES = 10000


def train_generator_PG(gen, gen_opt, oracle, dis, num_batches):
    for batch in range(num_batches):
        s = gen.sample(BATCH_SIZE * 2)
        inp, target = prepare_generator_batch(s, start_letter=0, gpu=CUDA)
        rewards = dis.batchClassify(target)
        gen_opt.zero_grad()
        pg_loss = gen.batchPGLoss(inp, target, rewards)
        pg_loss.backward()
        gen_opt.step()


def wgan_step(gen, dis, gen_opt, dis_opt, real, z, lambda_gp=10):
    fake = gen(z)
    # critic
    dis_opt.zero_grad()
    d_real = dis(real).mean()
    d_fake = dis(fake.detach()).mean()
    alpha = torch.rand(real.size(0), 1, 1, device=real.device)
    inter = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_(True)
    d_inter = dis(inter)
    grads = torch.autograd.grad(d_inter, inter, torch.ones_like(d_inter), create_graph=True, retain_graph=True)[0]
    gp = ((grads.norm(2, dim=1) - 1) ** 2).mean()
    d_loss = d_fake - d_real + lambda_gp * gp
    d_loss.backward()
    dis_opt.step()
    # generator
    gen_opt.zero_grad()
    g_loss = -dis(fake).mean()
    g_loss.backward()
    gen_opt.step()
    return d_loss.item(), g_loss.item()


def train_shared_fake(gen, dis, gen_opt, dis_opt, loader, z_dim):
    bce = nn.BCEWithLogitsLoss()
    for real in loader:
        real = real.cuda() if CUDA else real
        z = torch.randn(real.size(0), z_dim, device=real.device)
        fake = gen(z)
        pred_fake = dis(fake)
        d_loss = bce(pred_fake, torch.zeros_like(pred_fake)) + bce(dis(real), torch.ones_like(pred_fake))
        dis_opt.zero_grad()
        # the graph through gen is used again below
        d_loss.backward(retain_graph=True)
        gen_opt.zero_grad()
        g_loss = bce(pred_fake, torch.ones_like(pred_fake))
        g_loss.backward()
        dis_opt.step()
        gen_opt.step()


if __name__ == "__main__":
    gen = Generator(32, 32, 5000, 20, gpu=CUDA)
    dis = Discriminator(64, 64, 5000, 20, gpu=CUDA)
    if CUDA:
        gen = gen.cuda()
        dis = dis.cuda()
    gen_opt = optim.Adam(gen.parameters(), lr=1e-2)
    dis_opt = optim.Adagrad(dis.parameters())
    for epoch in range(50):
        train_generator_PG(gen, gen_opt, None, dis, 1)
        real, z = prepare_discriminator_data(POS_NEG_SAMPLES)
        print(wgan_step(gen, dis, gen_opt, dis_opt, real, z))
