from __future__ import unicode_literals, print_function, division

import random
import re
from io import open

import torch
import torch.nn as nn
from torch import optim
import torch.nn.functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOS_token, EOS_token, MAX_LENGTH = 0, 1, 10


class Lang:
    def __init__(self, name):
        self.name = name
        self.word2index, self.word2count, self.index2word, self.n_words = {}, {}, {0: "SOS", 1: "EOS"}, 2

    def addSentence(self, sentence):
        for word in sentence.split(" "):
            if word not in self.word2index:
                self.word2index[word] = self.n_words
                self.n_words += 1


def readLangs(lang1, lang2):
    lines = open("data/%s-%s.txt" % (lang1, lang2), encoding="utf-8").read().strip().split("\n")
    pairs = [[re.sub(r"[^a-z]+", " ", s) for s in l.split("\t")] for l in lines]
    return Lang(lang1), Lang(lang2), pairs


def train(input_tensor, target_tensor, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    encoder_hidden = encoder.initHidden()
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    input_length, target_length = input_tensor.size(0), target_tensor.size(0)
    encoder_outputs = torch.zeros(MAX_LENGTH, encoder.hidden_size, device=device)
    loss = 0
    for ei in range(input_length):
        encoder_output, encoder_hidden = encoder(input_tensor[ei], encoder_hidden)
        encoder_outputs[ei] = encoder_output[0, 0]
    decoder_input = torch.tensor([[SOS_token]], device=device)
    decoder_hidden = encoder_hidden
    if random.random() < 0.5:
        for di in range(target_length):
            decoder_output, decoder_hidden, att = decoder(decoder_input, decoder_hidden, encoder_outputs)
            loss += criterion(decoder_output, target_tensor[di])
            decoder_input = target_tensor[di]
    else:
        for di in range(target_length):
            decoder_output, decoder_hidden, att = decoder(decoder_input, decoder_hidden, encoder_outputs)
            topv, topi = decoder_output.topk(1)
            decoder_input = topi.squeeze().detach()
            loss += criterion(decoder_output, target_tensor[di])
            if decoder_input.item() == EOS_token:
                break
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item() / target_length


def trainIters(encoder, decoder, training_pairs, n_iters, print_every=1000, learning_rate=0.01):
    plot_losses = []
    print_loss_total = 0
    encoder_optimizer = optim.SGD(encoder.parameters(), lr=learning_rate)
    decoder_optimizer = optim.SGD(decoder.parameters(), lr=learning_rate)
    criterion = nn.NLLLoss()
    for it in range(1, n_iters + 1):
        input_tensor, target_tensor = training_pairs[it - 1]
        loss = train(input_tensor, target_tensor, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion)
        print_loss_total += loss
        if it % print_every == 0:
            plot_losses.append(print_loss_total / print_every)
            print_loss_total = 0
    return plot_losses


def evaluate(encoder, decoder, input_tensor, max_length=MAX_LENGTH):
    with torch.no_grad():
        encoder_hidden = encoder.initHidden()
        decoder_attentions = torch.zeros(max_length, max_length)
        for ei in range(input_tensor.size(0)):
            _, encoder_hidden = encoder(input_tensor[ei], encoder_hidden)
        return encoder_hidden, decoder_attentions
