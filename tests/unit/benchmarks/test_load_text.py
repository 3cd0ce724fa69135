"""Prompts cut from a text."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from load_kit import PROSE, exact_book, tokenizer
from load_text import Book, InputError, Prompt, open_book, read_tokenizer

EXACT = exact_book()
ESTIMATED = Book(PROSE)


@pytest.mark.parametrize("book", [EXACT, ESTIMATED], ids=["tokenizer", "no tokenizer"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 100, 1000])
def test_a_prompt_has_the_tokens_that_were_asked_for_also_as_text(book: Book, tokens: int) -> None:
    for name in map(str, range(20)):
        prompt = book.prompt(name, tokens)
        assert len(prompt.ids) == tokens
        assert book.read(prompt.text) == prompt


def test_prompts_one_after_another_have_their_tokens_one_after_another() -> None:
    parts = [EXACT.prompt(f"part {i}", 16) for i in range(30)]
    whole = sum(parts, Prompt("", ()))
    assert EXACT.read(whole.text) == whole
    assert whole.ids == tuple(id for part in parts for id in part.ids)


def test_equal_names_have_equal_prompts_and_others_begin_otherwise() -> None:
    again = exact_book()
    assert again.prompt("a", 50) == EXACT.prompt("a", 50)
    begins = {EXACT.prompt(f"name {i}", 64).ids[:16] for i in range(300)}
    assert len(begins) == 300  # though the text has fewer places than there could be names


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 31, 32, 40])
def test_a_part_is_the_beginning_of_the_whole(keep: int) -> None:
    whole, part = EXACT.prompt("a block", 32), EXACT.prompt("a block", 32, keep)
    assert part.ids == whole.ids[:keep]
    assert whole.text.startswith(part.text)


def test_a_prompt_may_be_longer_than_the_text() -> None:
    tokens = 3 * len(EXACT.read(PROSE).ids)
    assert len(EXACT.prompt("long", tokens).ids) == tokens
    assert len(EXACT.prompt("long", tokens, tokens - 5).ids) == tokens - 5


def test_the_ends_of_tokens_are_characters() -> None:
    ends = EXACT.ends(" the sword")
    assert ends[-1] == len(" the sword")
    assert len(ends) == len(EXACT.read(" the sword").ids)


def test_a_text_may_be_gzipped_and_a_tokenizer_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "prose.gz").write_bytes(gzip.compress(PROSE.encode()))
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    book, source = open_book(tmp_path / "prose.gz", tmp_path)
    assert book.exact
    assert "prose.gz" in source
    assert book.prompt("a", 40) == EXACT.prompt("a", 40)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot be read: .*; allowed"):
        read_tokenizer(tmp_path)
    with pytest.raises(InputError, match="cannot be read as text"):
        open_book(tmp_path / "none", None)
    with pytest.raises(InputError, match="has 3 words"):
        Book("far too short")
