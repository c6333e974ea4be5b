import random, re, time, os
import numpy as np, pandas as pd
import torch, torch.nn as nn, torch.utils.data
from sklearn import metrics
from keras.preprocessing import text, sequence

EMB = {'glove': '../input/glove.840B.300d.txt', 'crawl': '../input/crawl-300d-2M.vec'}


def get_coefs(word, *arr):
    return word, np.asarray(arr, dtype='float32')


def load_embeddings(path):
    with open(path) as f:
        return dict(get_coefs(*line.strip().split(' ')) for line in f)


def build_matrix(word_index, path):
    embedding_index = load_embeddings(path)
    m = np.zeros((len(word_index) + 1, 300))
    for word, i in word_index.items():
        try:
            m[i] = embedding_index[word]
        except KeyError:
            pass
    return m


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def train_model(model, train, test, loss_fn, output_dim, lr=0.001, batch_size=512, n_epochs=4):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    train_loader = torch.utils.data.DataLoader(train, batch_size=batch_size, shuffle=True)
    test_loader = torch.utils.data.DataLoader(test, batch_size=batch_size, shuffle=False)
    all_test_preds = []
    for epoch in range(n_epochs):
        start_time = time.time()
        model.train()
        avg_loss = 0.
        for data in train_loader:
            x_batch = data[:-1]
            y_batch = data[-1]
            y_pred = model(*x_batch)
            loss = loss_fn(y_pred, y_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            avg_loss += loss.item() / len(train_loader)
        model.eval()
        test_preds = np.zeros((len(test), output_dim))
        for i, x_batch in enumerate(test_loader):
            y_pred = sigmoid(model(*x_batch).detach().cpu().numpy())
            test_preds[i * batch_size:(i + 1) * batch_size, :] = y_pred
        all_test_preds.append(test_preds)
        print('Epoch {}/{} \t loss={:.4f} \t time={:.2f}s'.format(epoch + 1, n_epochs, avg_loss, time.time() - start_time))
    return np.average(all_test_preds, axis=0)


train_df = pd.read_csv('../input/train.csv')
x_train = sequence.pad_sequences(text.Tokenizer().texts_to_sequences(train_df['comment_text']), maxlen=220)
x = torch.tensor(x_train, dtype=torch.long).cuda()
train_dataset = torch.utils.data.TensorDataset(x, torch.tensor(train_df['target'].values).cuda())
