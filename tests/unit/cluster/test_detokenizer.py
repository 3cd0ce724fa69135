"""What is streamed is the text, by complete characters, without a letter of a stop string."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vocab_kit import SCRIPTS, byte_level, sentencepiece, write_gguf

from bifolio.cluster.detokenizer import Detokenizer
from bifolio.cluster.tokenizer import Tokenizer

SAMPLES = [
    "Once upon a time, there was a model that said:\nUser: hello\n",
    "서울은 대한민국의 수도이다. 안녕하세요!",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 family",
    "e\u0301a\u0308\u0323 n\u0303 combining",
    "שלום עולם مرحبا بالعالم",
    "\ufffd\ufffd really there \ufffd",
    "𝕏𐍈\U0010ffff",
]
texts = st.one_of(st.sampled_from(SAMPLES), st.text(max_size=30))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_gguf)


@pytest.fixture(scope="module")
def glassllm(glassllm_dir: Path) -> Tokenizer:
    return Tokenizer.load(glassllm_dir)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama 2's kind; only English has tokens, all else is bytes."""
    return Tokenizer.load(write_gguf(tmp_path_factory.mktemp("spm") / "m.gguf", sentencepiece()))


@pytest.fixture(scope="module")
def small_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level with 700 tokens: characters of most scripts are cut into bytes."""
    return Tokenizer.load(write_gguf(tmp_path_factory.mktemp("bpe") / "m.gguf", byte_level() | {"pre": "qwen2"}))


def pieces_of(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """The stream, with `ids` handed over in groups that end at `cuts`."""
    edges = [0, *sorted(cuts), len(ids)]
    stream = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*stream, detokenizer.finish()]


def cuts_of(data: st.DataObject, ids: list[int]) -> list[int]:
    return data.draw(st.lists(st.integers(0, len(ids)), max_size=8))


@pytest.mark.parametrize("name", ["smollm2", "glassllm"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_stream_is_the_text(request: pytest.FixtureRequest, name: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30)
    ids = data.draw(st.one_of(random_ids, texts.map(tokenizer.encode)))
    stream = pieces_of(Detokenizer(tokenizer), ids, cuts_of(data, ids))
    assert "".join(stream) == tokenizer._backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["smollm2", "glassllm", "byte_fallback", "small_bytes"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_at_every_token_all_that_is_complete_was_sent(
    request: pytest.FixtureRequest, name: str, data: st.DataObject
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    samples = st.lists(st.sampled_from(SCRIPTS).flatmap(lambda s: st.integers(0, len(s)).map(lambda cut: s[cut:])))
    text = data.draw(st.one_of(samples.map("".join), st.text(max_size=30)))
    ids = tokenizer.encode(text)
    whole, detokenizer, sent, taken = tokenizer.decode(ids), Detokenizer(tokenizer), "", b""
    assume(whole.count("\ufffd") <= text.count("\ufffd"))  # SmolLM2 has no token for some bytes of rare characters
    for id in ids:
        sent += detokenizer.push([id])
        taken += tokenizer.piece(id)
        complete = taken.decode("utf-8", "ignore")  # of true text it leaves out nothing but a cut-off end
        assert sent == (complete.removeprefix(" ") if tokenizer.strips_space else complete)
        assert whole.startswith(sent)
    assert sent + detokenizer.finish() == whole


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stream_of_any_tokens_is_their_text(byte_fallback: Tokenizer, data: st.DataObject) -> None:
    """Also of byte tokens that are no UTF-8."""
    ids = data.draw(st.lists(st.one_of(st.integers(3, 258), st.integers(0, byte_fallback.vocab_size)), max_size=30))
    stream = pieces_of(Detokenizer(byte_fallback), ids, cuts_of(data, ids))
    assert "".join(stream) == byte_fallback.decode(ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_every_split_point_gives_the_same_text_and_whole_characters(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    for cut in range(len(ids) + 1):
        stream = pieces_of(Detokenizer(smollm2), ids, [cut])
        assert "".join(stream) == text
        assert text.startswith(stream[0])  # never a replacement for what is only incomplete


def test_a_character_cut_off_at_the_end_is_one_replacement(smollm2: Tokenizer) -> None:
    emoji = next(ids for c in "🫠🦖🪗👩" if len(ids := smollm2.encode(c)) >= 3)
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.push(emoji[:-1]) == ""
    assert detokenizer.finish() == "\ufffd" == smollm2.decode(emoji[:-1])


def test_special_tokens_have_no_text(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.push([19556, 2, 0, 1]) + detokenizer.finish() == "Hello"


def test_a_special_token_inside_a_character_does_not_break_it(smollm2: Tokenizer) -> None:
    first, *rest = smollm2.encode("한")
    ids = [first, 2, *rest] if rest else [2, first]
    assert "".join(pieces_of(Detokenizer(smollm2), ids, [1, 2])) == smollm2.decode(ids) == "한"


def test_what_is_held_back_does_not_grow(smollm2: Tokenizer) -> None:
    lone = next(id for id in range(17, smollm2.vocab_size) if smollm2.decode([id]) == "\ufffd")
    detokenizer = Detokenizer(smollm2, ["\ufffd" * 50 + "x"])
    sent = sum(len(detokenizer.push([lone])) for _ in range(1000))
    assert (sent, len(detokenizer.finish())) == (950, 50)


# --- stop strings ----------------------------------------------------------------------------------------


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: cut where the stop string that is complete first begins; the longest of several."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_first_complete_stop_string_ends_the_answer(smollm2: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.one_of(texts, st.text("ab\n ", max_size=40)))
    inside = st.tuples(st.integers(0, len(text)), st.integers(1, 8)).map(lambda p: text[p[0] :][: p[1]])
    stop = st.one_of(inside, st.text("ab\n ", min_size=1, max_size=6)).filter(bool)
    stops = data.draw(st.lists(stop, min_size=1, max_size=4))
    ids = smollm2.encode(text)
    detokenizer = Detokenizer(smollm2, stops)
    stream = pieces_of(detokenizer, ids, cuts_of(data, ids))

    answer, stopped = expected(smollm2.decode(ids), stops)  # not every character is in the vocabulary
    assert "".join(stream) == answer
    assert detokenizer.stopped == stopped
    # the token that completed the stop string is the last one that counts
    if stopped:
        assert expected(smollm2.decode(ids[: detokenizer.tokens]), stops)[1]
        assert not expected(smollm2.decode(ids[: detokenizer.tokens - 1]).rstrip("\ufffd"), stops)[1]
    else:
        assert detokenizer.tokens == len(ids)


def stopped_by_hand(texts: list[str], stops: list[str], least: int) -> str | None:
    """The answer by its definition: the first stop string whose end lies in token `least` or a later one."""
    whole = "".join(texts)
    for end in range(len(whole) + 1):
        token = next((n for n in range(len(texts) + 1) if len("".join(texts[:n])) >= end), 0)
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found and token >= least:
            return whole[: end - max(map(len, found))]
    return None


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stop_string_complete_before_the_least_tokens_is_text(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=12))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
    least = data.draw(st.integers(0, 13))

    class Spelled:
        strips_space = False

        @staticmethod
        def piece(id: int) -> bytes:
            return texts[id].encode()

    detokenizer = Detokenizer(Spelled(), stops, least)  # type: ignore[arg-type]
    ids = list(range(len(texts)))
    stream = pieces_of(detokenizer, ids, cuts_of(data, ids))
    answer = stopped_by_hand(texts, stops, least)
    assert "".join(stream) == ("".join(texts) if answer is None else answer)
    assert detokenizer.stopped == (answer is not None)
    assert detokenizer.tokens >= min(least, len(texts))


def test_a_stop_string_may_begin_before_the_least_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("One. Two. Three.")
    assert [smollm2.decode([id]) for id in ids] == ["One", ".", " Two", ".", " Three", "."]
    for least, answer, tokens in [(2, "One", 2), (3, "One. Two", 4), (4, "One. Two", 4), (7, "One. Two. Three.", 6)]:
        detokenizer = Detokenizer(smollm2, ["."], least)
        assert (detokenizer.push(ids) + detokenizer.finish(), detokenizer.tokens) == (answer, tokens)
    detokenizer = Detokenizer(smollm2, [". Two"], least=3)
    assert [detokenizer.push([id]) for id in ids[:3]] == ["One", "", ""]
    assert detokenizer.stopped


def test_only_a_live_partial_match_is_held_back(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2, ["\nUser:", "x" * 30])
    sent = [detokenizer.push([id]) for id in smollm2.encode("Hi.\nUsual xx day")]
    assert "".join(sent) == "Hi.\nUsual xx day"
    assert "" in sent  # "\n" waited
    assert detokenizer.finish() == ""


def test_what_was_held_is_flushed_at_the_end(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2, ["\nUser:"])
    assert detokenizer.push(smollm2.encode("Hi.\nUser")) == "Hi."
    assert detokenizer.finish() == "\nUser"


def test_nothing_comes_after_a_stop(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2, ["."])
    assert detokenizer.push(smollm2.encode("One. Two. Three.")) == "One"
    assert detokenizer.stopped
    assert detokenizer.tokens == 2
    assert detokenizer.push([19556]) + detokenizer.finish() == ""


def test_a_stop_string_may_be_an_incomplete_characters_replacement(smollm2: Tokenizer) -> None:
    lone = next(id for id in range(17, smollm2.vocab_size) if smollm2.decode([id]) == "\ufffd")
    detokenizer = Detokenizer(smollm2, ["\ufffd"])
    assert detokenizer.push([19556, lone]) + detokenizer.finish() == "Hello"


def test_a_text_that_begins_with_a_dropped_space(smollm2: Tokenizer) -> None:
    class Stripping:
        strips_space = True

        @staticmethod
        def piece(id: int) -> bytes:
            return [b"", b" a", b" "][id]

    detokenizer = Detokenizer(Stripping())  # type: ignore[arg-type]
    assert [detokenizer.push([id]) for id in (0, 2, 1, 1)] == ["", "", " a", " a"]
