import torch
import torch.cuda.amp as amp
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m", torch_dtype=torch.float16).cuda()
tok = AutoTokenizer.from_pretrained("facebook/opt-350m")
opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
scaler = amp.GradScaler()
#
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1000)


def batches(path, bs=4):
    buf = []
    with open(path) as fh:
        for line in fh:
            buf.append(line.strip())
            if len(buf) == bs:
                yield tok(buf, padding=True, truncation=True, max_length=512, return_tensors="pt").to("cuda")
                buf = []
    if buf:
        yield tok(buf, padding="longest", truncation=True, max_length=512, return_tensors="pt").to("cuda")


for epoch in range(2):
    total = 0.0
    for n, b in enumerate(batches("train.txt"), 1):
        opt.zero_grad()
        with amp.autocast():
            loss = model(**b, labels=b["input_ids"]).loss
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        total += float(loss)
    print(epoch, total / n)
