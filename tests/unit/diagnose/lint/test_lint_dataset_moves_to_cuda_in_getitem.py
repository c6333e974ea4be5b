"""Samples that a data set moves to the GPU."""

from lint_snippets import found_where_marked
from plimsoll.diagnose.lint.dataset_moves_to_cuda_in_getitem import hits

SNIPPETS = {
    "cuda": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __getitem__(self, i):
                return torch.tensor(self.ids[i]).cuda()  # <-
    """,
    "to-device": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __getitem__(self, i):
                x = torch.tensor(self.ids[i])
                return x.to(self.device), self.y[i].to("cuda:0")  # <-
    """,
    "keyword": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __getitem__(self, i):
                return torch.tensor(self.ids[i], device=device)  # <-
    """,
    "inherited": r"""
        from torch.utils.data import Dataset
        class Base(Dataset):
            pass

        class Texts(Base):
            def __iter__(self):
                for ids in self.rows:
                    yield torch.tensor(ids).cuda()  # <-
    """,
    "dtype": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def __getitem__(self, i):
                return self.x[i].to(torch.long), self.y[i].to("cpu")
    """,
    "elsewhere": r"""
        from torch.utils.data import Dataset
        class Texts(Dataset):
            def to(self, device):
                self.x = self.x.to(device)
                return self

        for x in loader:
            x = x.cuda()
    """,
}

test_what_is_marked_is_found_and_nothing_else = found_where_marked(hits, SNIPPETS)
