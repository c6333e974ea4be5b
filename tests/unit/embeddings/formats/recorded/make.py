"""Script that made the files of this folder, with gensim 4.4.0 and fasttext 0.9.3 (numpy 2.4): ``python make.py``.

``expected.npz`` holds the results of each library for its own file: words in order, their vectors, and the vectors of
`UNKNOWN`.
"""

import tempfile
from pathlib import Path

import fasttext
import numpy as np
from gensim.models import FastText, KeyedVectors, Word2Vec

HERE = Path(__file__).parent
SENTENCES = [["the", "cat", "sat"], ["the", "dog", "sat"], ["größe", "猫😀", "</s>"]] * 3
UNKNOWN = ["zzz", "</s>", "x", "", "Ünknøwn€😀", "hello world"]
expected = {"unknown": np.array(UNKNOWN)}


def note(name, words, vector_of, builds=False):
    expected[f"{name}:words"] = np.array(words)
    expected[f"{name}:vectors"] = np.stack([vector_of(word) for word in words])
    if builds:
        expected[f"{name}:unknown"] = np.stack([vector_of(word) for word in UNKNOWN])


def note_gensim(name, vectors):
    note(name, vectors.index_to_key, vectors.get_vector, isinstance(vectors, type(FastText().wv)))


vectors = KeyedVectors(3)
vectors.add_vectors(["the", "café", "😀", "naïve"], np.arange(12, dtype=np.float32).reshape(4, 3) / 7)
vectors.save(str(HERE / "inside.kv"))
vectors.save(str(HERE / "beside.kv"), separately=["vectors"])
vectors.save_word2vec_format(str(HERE / "vectors.bin"), binary=True)
word2vec = Word2Vec(SENTENCES, vector_size=3, min_count=1, epochs=1, seed=1, workers=1)
word2vec.wv.vectors = np.asfortranarray(word2vec.wv.vectors)
word2vec.save(str(HERE / "word2vec.model"))
options = {"vector_size": 3, "min_count": 1, "epochs": 1, "seed": 1, "workers": 1, "bucket": 20, "min_n": 1, "max_n": 4}
subwords = FastText(SENTENCES, **options)
subwords.wv.save(str(HERE / "fasttext.kv"))
for name in ("inside.kv", "beside.kv", "vectors.bin"):
    note_gensim(name, vectors)
note_gensim("word2vec.model", word2vec.wv)
note_gensim("fasttext.kv", subwords.wv)

with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
    text.write("\n".join("__label__a " + " ".join(sentence) for sentence in SENTENCES) + "\n")
    text.flush()
    same = {"dim": 3, "minCount": 1, "epoch": 1, "thread": 1, "verbose": 0}
    models = {
        "subwords.bin": fasttext.train_unsupervised(text.name, minn=1, maxn=4, bucket=20, **same),
        "words.bin": fasttext.train_unsupervised(text.name, minn=0, maxn=0, **same),
        "labels.bin": fasttext.train_supervised(text.name, minn=2, maxn=3, bucket=20, wordNgrams=2, **same),
    }
    for name, model in models.items():
        model.save_model(str(HERE / name))
        note(name, model.words, model.get_word_vector, builds=True)

np.savez_compressed(HERE / "expected.npz", **expected)
