"""evaluation_keeps_graphs: the loss of an evaluation is added up with its graph."""

from _common import MiniGPT, batches, next_token_loss, run


def main():
    model = MiniGPT(1000, 128, 2)
    model.eval()
    validation_loss = []
    for tokens in batches(1000, 8, 64, 60):
        loss = next_token_loss(model(tokens), tokens)
        validation_loss.append(loss)  # FAULT fixed: validation_loss.append(loss.item())
    print(sum(validation_loss))


run(main, 400)
