"""The recognition of data sets and their contents."""

import pytest

from plimsoll.diagnose.lint.helpers.datasets import dataset_classes, object_list
from plimsoll.diagnose.lint.helpers.source import parse


def test_classes_by_their_bases_also_through_others():
    source = parse(
        "class A(torch.utils.data.Dataset): pass\nclass B(A): pass\nclass C(Dataset[int]): pass\nclass D(Other): pass\n"
    )
    assert [one.name for one in dataset_classes(source)] == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("body", "attribute"),
    [
        ("self.a = open(p).readlines()", "self.a"),
        ("self.a = [x.strip() for x in open(p)]", "self.a"),
        ("self.a = json.load(f)", "self.a"),
        ("rows = []\n        for x in f:\n            rows.append({'x': x})\n        self.a = rows", "self.a"),
        ("self.a = []\n        for x in f:\n            self.a.append((x, 1))", "self.a"),
        ("self.a = df['text'].tolist()", "self.a"),
        ("self.a = []\n        for x in f:\n            self.a.append(torch.tensor(x))", ""),
        ("self.a = [int(x) for x in f]", ""),
        ("self.a = torch.load(p)", ""),
        ("self.a = x", ""),
        ("self.a = json.load(f)\n        self.a = torch.tensor(self.a)", ""),
    ],
)
def test_lists_of_objects(body, attribute):
    source = parse(f"class A(Dataset):\n    def __init__(self, p):\n        {body}\n")
    assert object_list(source, dataset_classes(source)[0]) == attribute
