"""Words with tags for tests: files with a learnable rule, and jobs that read them."""

from __future__ import annotations

import random
from pathlib import Path

from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import TokenStore, tokenize
from plimsoll.data.tokens.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.records.job import TokenizerSource

Sentence = list[tuple[str, str]]
LSTM = {"architecture": "lstm", "embedding_size": 24, "hidden_size": 24, "bidirectional": True}
_NAMES = ["Ada", "Bob", "Carol", "Berlin", "Paris", "Nile", "Mars", "Zoe", "Rome", "Oslo"]
_OTHERS = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "and",
    "said",
    "was",
    "on",
    "with",
    "report",
    "wins",
    "lost",
    "old",
    "new",
    "day",
]


def conll(sentences: list[Sentence], delimiter: str = " ") -> str:
    """Return the file with one word per line."""
    return "\n".join("".join(f"{word}{delimiter}{tag}\n" for word, tag in sentence) for sentence in sentences)


def sentences_of_names(number: int, seed: int = 0) -> list[Sentence]:
    """Return sentences in which capitalized words are names of one or two words, and names are never adjacent."""
    drawn = random.Random(seed)
    sentences = []
    for _ in range(number):
        sentence: Sentence = []
        for _ in range(drawn.randint(3, 12)):
            if drawn.random() < 0.3:
                first, *rest = drawn.choices(_NAMES, k=drawn.randint(1, 2))
                sentence += [(first, "B-NAME"), *((name, "I-NAME") for name in rest)]
            sentence.append((drawn.choice(_OTHERS), "O"))
        sentences.append(sentence)
    return sentences


def tagged_corpus(path: Path, content: str, **reading: object) -> Corpus:
    """Index a file with this content."""
    path.write_text(content, encoding="utf-8")
    return open_corpus((str(path),), Reading(is_tagged=True, **reading), path.parent / "cache")


def tagged_store(path: Path, sentences: list[Sentence], **tokenizer: object) -> tuple[Corpus, Tokenizer, TokenStore]:
    """Tokenize sentences; by default each word that occurs is one token."""
    corpus = tagged_corpus(path, conll(sentences))
    source = TokenizerSource(**{"train": "words", "vocab_size": 1000} | tokenizer)
    made = prepare_tokenizer(source, corpus, path.parent / "cache")
    return corpus, made, tokenize(corpus, made, path.parent / "cache")
