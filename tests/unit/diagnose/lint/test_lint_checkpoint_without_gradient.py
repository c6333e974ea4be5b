"""Checkpointed modules that get no gradient."""

from textwrap import dedent, indent

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.checkpoint_without_gradient import hits
from plimsoll.diagnose.lint.helpers.source import parse

FROZEN = "self.embed.requires_grad_(False)"


def net(run: str, frozen: str = FROZEN, made: str = "nn.Embedding(9, 4)") -> str:
    """Return the source of a model with blocks over an embedding; `run` is the body of its forward pass."""
    body = indent(dedent(run).strip(), 8 * " ")
    return (
        "import torch\nfrom torch import nn\nfrom torch.utils.checkpoint import checkpoint, checkpoint_sequential\n"
        "class Net(nn.Module):\n    def __init__(self, table):\n"
        f"        self.embed = {made}\n        {frozen}\n"
        "        self.drop = nn.Dropout(0.1)\n        self.norm = nn.LayerNorm(4)\n"
        f"    def forward(self, ids, mask, hidden):\n{body}\n"
    )


LOOP = """
    x = self.embed(ids)
    for block in self.blocks:
        x = checkpoint(block, x{options}){mark}
    return self.head(x)
"""
FOUND = LOOP.format(options=", use_reentrant=True", mark="  # <-")
FINE = LOOP.format(options=", use_reentrant=True", mark="")

SNIPPETS = {
    "given": net(FOUND),
    "by-default": net(LOOP.format(options="", mark="  # <-")),
    "with-a-mask": net(LOOP.format(options=", mask", mark="  # <-")),
    "weight": net(FOUND, "self.embed.weight.requires_grad = False"),
    "loop": net(FOUND, "for p in self.embed.parameters(): p.requires_grad = False"),
    "made-frozen": net(FOUND, "pass", "nn.Embedding(9, 4).requires_grad_(False)"),
    "pretrained": net(FOUND, "pass", "nn.Embedding.from_pretrained(table)"),
    "through-dropout": net("x = self.drop(self.embed(ids).float())\nreturn checkpoint(self.block, x)  # <-"),
    "scaled": net("x = self.embed(ids) * 4.0\nreturn checkpoint(self.block, x, mask)  # <-"),
    "no-grad": net(
        "with torch.no_grad():\n    x = self.encoder(ids)\nreturn checkpoint(self.block, x, use_reentrant=True)  # <-"
    ),
    "with-gradients-in-training": net(
        "with torch.set_grad_enabled(self.training):\n    x = self.encoder(ids)\nreturn checkpoint(self.block, x)"
    ),
    "detached": net("return checkpoint(self.block, hidden.detach(), use_reentrant=True)  # <-"),
    "ids": net("return checkpoint(self.embed, ids)  # <-", "pass"),
    "sequential": net("x = self.embed(ids)\nreturn checkpoint_sequential(self.blocks, 2, x)  # <-"),
    "frozen-outside": net(FOUND, "pass") + "model = Net(None)\nmodel.embed.requires_grad_(False)\n",
    "not-reentrant": net(LOOP.format(options=", use_reentrant=False", mark="")),
    "of-a-setting": net(LOOP.format(options=", use_reentrant=self.reentrant", mark="")),
    "of-settings": net(LOOP.format(options=", **self.options", mark="")),
    "trains": net(FINE, "pass"),
    "trains-again": net(FINE) + "def thaw(model):\n    model.embed.requires_grad_(True)\n",
    "thaws-by-default": net(FINE) + "def thaw(model):\n    model.embed.requires_grad_()\n",
    "pretrained-and-trained": net(FINE, "pass", "nn.Embedding.from_pretrained(table, freeze=False)"),
    "input-needs-one": net(FINE.replace("for block", "x.requires_grad_()\n    for block")),
    "input-needs-one-by-a-hook": net(FINE) + "model.enable_input_require_grads()\n",
    "normed": net("x = self.norm(self.embed(ids))\nreturn checkpoint(self.block, x)"),
    "positions-train": net("x = self.embed(ids) + self.position.weight\nreturn checkpoint(self.block, x)"),
    "another-input": net("return checkpoint(self.block, self.embed(ids), hidden)"),
    "an-argument": net("return checkpoint(self.block, hidden)"),
    "one-branch": net("x = self.embed(ids)\nif mask is None:\n    x = self.norm(x)\nreturn checkpoint(self.block, x)"),
    "frozen-itself": net("return checkpoint(self.embed, ids)"),
    "evaluation": net("with torch.no_grad():\n    return checkpoint(self.block, self.embed(ids))"),
    "of-another-library": net(FINE).replace("torch.utils.checkpoint", "saving"),
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)


def test_what_is_written_is_mended():
    code = net(FOUND)
    ((edit,),) = [hit.edits for hit in hits(parse(code))]
    assert code[: edit.start] + edit.text + code[edit.end :] == code.replace(
        "use_reentrant=True", "use_reentrant=False"
    )
