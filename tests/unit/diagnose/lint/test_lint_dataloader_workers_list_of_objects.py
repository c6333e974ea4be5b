"""Workers over lists of Python objects."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.dataloader_workers_list_of_objects import hits

SNIPPETS = {
    "readlines": r"""
        from torch.utils.data import DataLoader, Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.lines = open(path).readlines()

        loader = DataLoader(Texts("a.txt"), batch_size=8, num_workers=4)  # <-
    """,
    "appended": r"""
        from torch.utils.data import DataLoader, Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.samples = []
                for line in open(path):
                    self.samples.append(json.loads(line))

        data = Texts("a.jsonl")
        loader = DataLoader(data, num_workers=2, batch_size=8)  # <-
    """,
    "by-a-method": r"""
        from torch.utils.data import DataLoader, Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.rows = self._read(path)

            def _read(self, path):
                rows = []
                for line in open(path):
                    rows.append(line.strip())
                return rows

        def main():
            data = Texts("a.txt")
            return DataLoader(data, num_workers=8)  # <-
    """,
    "number-by-name": r"""
        from torch.utils.data import DataLoader, Dataset
        NUM_WORKERS = 4
        class Texts(Dataset):
            def __init__(self, df):
                self.texts = df["text"].tolist()

        loader = DataLoader(Texts(df), num_workers=NUM_WORKERS)  # <-
    """,
    "number-of-the-command-line": r"""
        from torch.utils.data import DataLoader, Dataset
        parser.add_argument("--num-workers", type=int, default=4)
        class Texts(Dataset):
            def __init__(self, path):
                self.rows = [line.strip() for line in open(path)]

        loader = DataLoader(Texts(path), num_workers=args.num_workers)  # <-
    """,
    "no-workers": r"""
        from torch.utils.data import DataLoader, Dataset
        class Texts(Dataset):
            def __init__(self, path):
                self.lines = open(path).readlines()

        loader = DataLoader(Texts("a.txt"), batch_size=8)
        other = DataLoader(Texts("a.txt"), batch_size=8, num_workers=0)
    """,
    "tensors": r"""
        from torch.utils.data import DataLoader, Dataset, TensorDataset
        class Ids(Dataset):
            def __init__(self, path):
                self.ids = [int(line) for line in open(path)]
                self.ids = torch.tensor(self.ids)

        loader = DataLoader(Ids("a.txt"), num_workers=4)
        other = DataLoader(TensorDataset(x, y), num_workers=4)
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
