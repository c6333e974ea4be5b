import torch
import torch.nn as nn
from torch.nn import DataParallel
from torch.utils.data import DataLoader
from transformers import BertModel, BertTokenizerFast


class Classifier(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bert = BertModel.from_pretrained("bert-base-cased")
        self.out = nn.Linear(768, n)

    def forward(self, ids, mask):
        return self.out(self.bert(ids, attention_mask=mask).pooler_output)


tok = BertTokenizerFast.from_pretrained("bert-base-cased")


def collate(rows):
    texts, labels = zip(*rows)
    enc = tok(list(texts), padding=True, truncation=True, max_length=512, return_tensors="pt")
    return enc.input_ids, enc.attention_mask, torch.tensor(labels)


def main(rows):
    net = Classifier(4).cuda()
    if torch.cuda.device_count() > 1:
        net = DataParallel(net, device_ids=[0, 1])
    loader = DataLoader(rows, 16, True, collate_fn=collate)
    opt = torch.optim.Adam(net.parameters(), 2e-5)
    ce = nn.CrossEntropyLoss()
    history = {"loss": [], "acc": []}
    for ep in range(3):
        ep_loss = []
        for ids, mask, y in loader:
            ids = torch.cuda.pin_memory(ids)
            opt.zero_grad()
            logits = net(ids.cuda(), mask.cuda())
            loss = ce(logits, y.cuda())
            loss.backward()
            opt.step()
            ep_loss.append(loss.detach().cpu().item())
            history["loss"].append(loss.data)
            history["acc"].append((logits.argmax(1) == y.cuda()).float().mean())
            del loss, logits
        print(ep, sum(ep_loss) / len(ep_loss))
    module = net.module if isinstance(net, nn.DataParallel) else net
    torch.save(module.state_dict(), "x.pt")
    return history
