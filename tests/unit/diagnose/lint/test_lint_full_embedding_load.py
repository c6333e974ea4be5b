"""Tables of word vectors that are loaded completely."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.full_embedding_load import hits

SNIPPETS = {
    "torchtext": r"""
        from torchtext.vocab import GloVe
        vectors = GloVe(name="6B", dim=100)  # <-
    """,
    "torchtext-module": r"""
        import torchtext
        vectors = torchtext.vocab.FastText("en")  # <-
    """,
    "gensim": r"""
        from gensim.models import KeyedVectors
        w2v = KeyedVectors.load_word2vec_format("GoogleNews.bin", binary=True)  # <-
    """,
    "downloader": r"""
        import gensim.downloader as api
        glove = api.load("glove-wiki-gigaword-100")  # <-
    """,
    "by-hand": r"""
        import numpy as np
        embeddings_index = {}
        with open("glove.6B.100d.txt", encoding="utf8") as f:
            for line in f:
                values = line.split()
                embeddings_index[values[0]] = np.asarray(values[1:], dtype="float32")  # <-
    """,
    "by-hand-in-a-function": r"""
        import numpy as np
        def load_glove(path):
            table = {}
            for line in open(path):
                word, *vector = line.rstrip().split(" ")
                coefs = np.array([float(x) for x in vector])
                table[word] = coefs  # <-
            return table
    """,
    "by-a-vocabulary": r"""
        TEXT.build_vocab(train, max_size=25000, vectors="glove.6B.100d")  # <-
        LABEL.build_vocab(train)
    """,
    "limited": r"""
        from gensim.models import KeyedVectors
        w2v = KeyedVectors.load_word2vec_format("GoogleNews.bin", binary=True, limit=50000)
    """,
    "only-the-vocabulary": r"""
        import numpy as np
        def load_glove(path, vocab):
            table = {}
            for line in open(path):
                values = line.split()
                if values[0] in vocab:
                    table[values[0]] = np.asarray(values[1:], dtype="float32")
            return table
    """,
    "skips-others": r"""
        import numpy as np
        with open("glove.txt") as f:
            for line in f:
                word, *vec = line.split()
                if word not in vocab:
                    continue
                table[word] = np.asarray(vec, dtype=float)
    """,
    "training-of-word2vec": r"""
        from gensim.models import FastText
        model = FastText(sentences, vector_size=100)
    """,
    "another-table": r"""
        scores = {}
        for line in open("scores.tsv"):
            name, value = line.split("\t")
            scores[name] = float(value)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
