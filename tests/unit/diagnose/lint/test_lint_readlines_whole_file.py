"""Corpora that are read into memory completely."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.readlines_whole_file import hits

SNIPPETS = {
    "data-set": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __init__(self, path):
                with open(path) as f:
                    self.lines = f.readlines()  # <-
    """,
    "splitlines": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.lines = open(path, encoding="utf-8").read().splitlines()  # <-
    """,
    "split": r"""
        from torch.utils.data import IterableDataset
        class Texts(IterableDataset):
            def __iter__(self):
                with open(self.path) as f:
                    for line in f.read().split("\n"):  # <-
                        yield line
    """,
    "list-of-a-file": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __init__(self, path):
                with open(path) as f:
                    self.rows = list(f)  # <-
    """,
    "corpus-function": r"""
        import torch
        def load_corpus(path):
            with open(path) as f:
                lines = f.readlines()  # <-
            return lines
    """,
    "named-file": r"""
        import torch
        train_lines = open("data/train.txt").readlines()  # <-
    """,
    "one-text-of-a-script": r"""
        import torch
        text = open("data/anna.txt").read()  # <-
    """,
    "path": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.rows = Path(path).read_text().splitlines()  # <-
    """,
    "parsed-by-line": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.rows = [json.loads(line) for line in open(path)]  # <-
                self.few = [line for line in open(path) if line in wanted]
    """,
    "one-text": r"""
        from torch.utils.data import Dataset
        class Chars(Dataset):
            def __init__(self, path):
                with open(path) as f:
                    self.text = f.read()  # <-
    """,
    "stripped": r"""
        import torch
        def read_pairs(name):
            return open(name).read().strip().split("\n")  # <-
    """,
    "words-of-one-line": r"""
        import torch
        def read_pairs(name):
            return json.loads(open(name).read())
    """,
    "vocabulary": r"""
        import torch
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __init__(self, vocab_file):
                with open(vocab_file) as f:
                    self.words = f.readlines()
    """,
    "labels-and-stopwords": r"""
        import torch
        labels = open("labels.txt").readlines()
        stopwords = open("stopwords.txt").read().splitlines()
        classes = [x.strip() for x in open(dataset + "/data/class.txt").readlines()]
    """,
    "streaming": r"""
        from torch.utils.data import IterableDataset
        class Texts(IterableDataset):
            def __iter__(self):
                with open(self.path) as f:
                    for line in f:
                        yield line.strip()
    """,
    "no-training-code": r"""
        import sys
        lines = open("train.txt").readlines()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
