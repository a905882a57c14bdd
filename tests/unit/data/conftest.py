"""A corpus and its tokenizer."""

import json

import pytest
from preprocessing import TEXTS

from megatron5d.tools.tokenizer import train_sentencepiece


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    return train_sentencepiece(TEXTS, 330, tmp_path_factory.mktemp("tok") / "tok")


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path
