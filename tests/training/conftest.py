"""Prepared data of a few kilobytes."""

from pathlib import Path

import pytest

from hrmlm.data.prepare import prepare

LINE = "the quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun.\n"


def prepared(directory: Path, documents: int, text: str = LINE) -> Path:
    source = directory / "corpus.txt"
    source.write_text("\n\n".join(f"{number}: {text}" for number in range(documents)), encoding="utf-8")
    prepare([str(source)], directory / "data", tokenizer="bytes", valid_fraction=0.1, separator="\n\n")
    return directory / "data"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 25,000 bytes, tokenizer `bytes` (257 ids)."""
    return prepared(tmp_path_factory.mktemp("data"), 300)


@pytest.fixture(scope="session")
def short_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 windows of 32 tokens: an epoch ends after a few batches."""
    return prepared(tmp_path_factory.mktemp("short"), 9)


@pytest.fixture(scope="session")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer and other text."""
    return prepared(tmp_path_factory.mktemp("other"), 50, "something else entirely.\n")
