"""What text reaches a client: no part of a stop string, no special token, no broken character."""

from __future__ import annotations

import pytest
from cluster_kit import over_grpc, streamed, whole

from bifolio.cluster.spawn import SpawnedCluster
from bifolio.cluster.tokenizer import Tokenizer

pytestmark = pytest.mark.cluster

PROMPT = "One, two, three, four, five,"
QUESTION = "<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n"
CJK = "日本 日本 日本 日本 日本 日本 日本"  # three tokens to a character or two; the model goes on with it


def test_nothing_of_a_stop_string_reaches_the_client(smollm2: SpawnedCluster) -> None:
    text = whole(smollm2, PROMPT, max_tokens=24, temperature=0.0).text
    for stop in (text[9:12], text[11:24], text[14]):  # inside tokens and across them
        expected = text[: text.index(stop)]
        for answer in (
            streamed(smollm2, PROMPT, max_tokens=24, temperature=0.0, stop=["never", stop]),
            over_grpc(smollm2, PROMPT, max_tokens=24, temperature=0.0, stop=[stop]),
        ):
            assert answer.text == expected
            assert answer.finish == "stop"
            assert answer.usage["completion_tokens"] < 24


def test_what_only_begins_like_a_stop_string_is_sent(smollm2: SpawnedCluster) -> None:
    plain = whole(smollm2, PROMPT, max_tokens=16, temperature=0.0)
    answer = streamed(smollm2, PROMPT, max_tokens=16, temperature=0.0, stop=[plain.text[-5:] + "\0", ", \0"])
    assert (answer.text, answer.finish) == (plain.text, "length")


def test_a_stop_token_ends_the_answer_and_is_no_part_of_its_text(smollm2: SpawnedCluster) -> None:
    plain = over_grpc(smollm2, PROMPT, max_tokens=12, temperature=0.0)
    stop = plain.ids[5]
    end = plain.ids.index(stop)
    answer = over_grpc(smollm2, PROMPT, max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    assert (answer.ids, answer.finish) == (plain.ids[: end + 1], "stop")
    assert plain.text.startswith(answer.text)
    assert answer.text == over_grpc(smollm2, PROMPT, max_tokens=end, temperature=0.0).text


def test_special_tokens_have_no_text_even_when_the_end_is_ignored(
    smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer
) -> None:
    ended = over_grpc(smollm2, QUESTION, max_tokens=40, temperature=0.0)
    assert ended.finish == "stop"
    assert ended.ids[-1] in smollm2_tokenizer.eos_ids
    further = over_grpc(smollm2, QUESTION, max_tokens=40, temperature=0.0, ignore_eos=True)
    assert further.finish == "length"
    assert len(further.ids) == 40
    assert further.ids[: len(ended.ids)] == ended.ids
    assert further.text == smollm2_tokenizer.decode(further.ids)
    assert further.text.startswith(ended.text)
    assert "<|" not in further.text


def test_a_character_cut_off_at_the_end_becomes_one_replacement(
    smollm2: SpawnedCluster, smollm2_tokenizer: Tokenizer
) -> None:
    ids = over_grpc(smollm2, CJK, max_tokens=12, temperature=0.0).ids
    texts = {n: smollm2_tokenizer.decode(ids[:n]) for n in range(4, 13)}
    assert [text.endswith("\ufffd") for text in texts.values()].count(True) >= 3, "no cut falls inside a character"
    for n, text in texts.items():
        for answer in (
            streamed(smollm2, CJK, max_tokens=n, temperature=0.0),
            over_grpc(smollm2, CJK, max_tokens=n, temperature=0.0),
        ):
            assert answer.text == text
            assert answer.text.count("\ufffd") == text.endswith("\ufffd")
            assert "\ufffd" not in "".join(answer.pieces[:-1]), "something incomplete was sent before the end"
