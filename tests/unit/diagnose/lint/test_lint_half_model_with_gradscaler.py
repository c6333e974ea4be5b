"""Models in float16 under a GradScaler."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.half_model_with_gradscaler import hits

SNIPPETS = {
    "half": r"""
        model = Net().to("cuda")
        model.half()  # <-
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
    """,
    "to-float16": r"""
        model = model.to(torch.float16)  # <-
        model.train()
        scaler = GradScaler()
        scaler.scale(loss).backward()
    """,
    "from-pretrained": r"""
        model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)  # <-
        model.train()
        scaler = GradScaler()
        scaler.scale(model(x).loss).backward()
    """,
    "made-and-halved": r"""
        class Net(nn.Module):
            pass

        model = Net().cuda().half()  # <-
        optimizer = torch.optim.Adam(model.parameters())
        scaler = GradScaler()
        scaler.scale(loss).backward()
    """,
    "inputs-are-half": r"""
        model = Net().cuda()
        scaler = GradScaler()
        x = x.half()
        scaler.scale(model(x).mean()).backward()
    """,
    "for-inference": r"""
        model = AutoModel.from_pretrained("m").half().cuda().eval()
        scaler = GradScaler()
        scaler.scale(other(x)).backward()
    """,
    "rounded": r"""
        model.half().float()
        scaler = GradScaler()
        scaler.scale(model(x)).backward()
    """,
    "no-scaler": r"""
        model.half()
        model(x).mean().backward()
    """,
    "teacher": r"""
        teacher = AutoModel.from_pretrained("t", torch_dtype=torch.float16)
        teacher.eval()
        scaler = GradScaler()
        scaler.scale(student(x)).backward()
    """,
    "switched-off": r"""
        model.half()
        scaler = GradScaler(enabled=False)
        scaler.scale(model(x)).backward()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
