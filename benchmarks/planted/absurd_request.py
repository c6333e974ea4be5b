"""absurd_request: a product with the wrong side transposed asks for every pair of samples' tokens."""

from _common import MiniGPT, batches, run


def main():
    model = MiniGPT(500, 64, 1)
    for tokens in batches(500, 16, 512, 3):
        hidden = model.embedding(tokens).flatten(0, 1)
        gram = hidden @ hidden.T  # FAULT fixed: gram = hidden.T @ hidden
        print(gram.shape)


run(main, 150)
