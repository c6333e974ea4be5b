import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


def train(model, ref_model, loader, steps_per_update=4, lr=1e-5, device="cuda"):
    model.to(device)
    ref_model.half().to(device).eval()  # frozen teacher
    for p in ref_model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = GradScaler(device)
    window = []
    seen = 0
    optimizer.zero_grad()
    for i, batch in enumerate(loader):
        ids = batch["input_ids"].to(device)
        with autocast(device):
            with torch.no_grad():
                teacher = ref_model(ids).logits
            student = model(ids).logits
            loss = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        scaler.scale(loss / steps_per_update).backward()
        window.append(loss.detach())
        if len(window) == steps_per_update:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            print(torch.stack(window).mean().item())
            window = []
        seen += ids.numel()
    if window:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return seen


def losses_kept_but_needed(model, tasks, optimizer):
    """Sum of task losses, one backward."""
    for batch in zip(*tasks):
        losses = []
        total = 0
        for task_id, sub in enumerate(batch):
            loss = model(sub, task=task_id)
            losses.append(loss)
            total = total + loss
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        print([float(l) for l in losses])
