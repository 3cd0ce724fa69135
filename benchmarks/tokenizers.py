#!/usr/bin/env python3
"""Are texts and ids right? Ours against transformers, over every text of a directory.

    python -P benchmarks/tokenizers.py --prompts DIR [--model smollm2-135m] [--model DIR ...]

(-P: this file is named like a package that it imports.)

DIR holds .jsonl and .txt files, gzipped or not. Each string in a JSON line is a text, and so are each 20 lines of a
.txt and all of it at once. `--model` is a known model, a .gguf file or a Hugging Face directory. For each model it
counts

    ids       texts whose ids differ from transformers'
    decoded   texts whose ids transformers decodes otherwise
    returned  texts that encode and decode changed, apart from characters that the vocabulary has no token for
    streamed  texts whose stream, token by token and cut at random, is not their whole text

and the exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from bifolio.cluster.detokenizer import Detokenizer
from bifolio.cluster.models import resolve
from bifolio.cluster.tokenizer import Tokenizer
from bifolio.replicas.gguf_file import GgufFile

LINES = 20


@dataclass
class Counts:
    texts: int = 0
    tokens: int = 0
    incomplete: int = 0  # texts with characters that have no token
    ids: int = 0
    decoded: int = 0
    returned: int = 0
    streamed: int = 0

    def wrong(self) -> int:
        return self.ids + self.decoded + self.returned + self.streamed


def read_texts(folder: Path) -> list[str]:
    texts: dict[str, None] = {}  # each once, in order
    for path in sorted(folder.rglob("*")):
        if not path.name.removesuffix(".gz").endswith((".jsonl", ".txt")):
            continue
        raw = path.read_bytes()
        content = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        if ".jsonl" in path.name:
            for line in content.splitlines():
                texts |= dict.fromkeys(strings(json.loads(line)))
        else:
            lines = content.splitlines(keepends=True)
            pieces = ["".join(lines[at : at + LINES]) for at in range(0, len(lines), LINES)]
            texts |= dict.fromkeys([*pieces, content])
    return list(texts)


def strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from strings(item)
        case dict():
            for item in value.values():
                yield from strings(item)


def load_oracle(source: Path) -> Any:
    if source.is_dir():
        return AutoTokenizer.from_pretrained(source)
    oracle = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if GgufFile(source).get("tokenizer.ggml.pre") == "smollm":
        # transformers does not know this one; the rule is that of SmolLM2's own tokenizer.json
        oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return oracle


def compare(source: Path, texts: list[str]) -> Counts:
    ours, theirs, counts, chance = Tokenizer.load(source), load_oracle(source), Counts(), random.Random(0)
    for number, text in enumerate(texts, 1):
        ids = ours.encode(text)
        whole = ours.decode(ids)
        counts.texts += 1
        counts.tokens += len(ids)
        counts.ids += ids != theirs.encode(text)
        counts.decoded += whole != theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if complete(ours, text, ids):
            counts.returned += whole not in (text, unicodedata.normalize("NFC", text))
        else:
            counts.incomplete += 1
        every = list(range(1, len(ids)))
        some = sorted(chance.sample(every, min(len(every), 1 + len(ids) // 8)))
        counts.streamed += any(stream(ours, ids, cuts, whole) != whole for cuts in (every, some))
        if number % 100 == 0 and sys.stderr.isatty():
            print(f"\r{number}/{len(texts)} texts ", end="", file=sys.stderr, flush=True)
    return counts


def complete(tokenizer: Tokenizer, text: str, ids: list[int]) -> bool:
    """Whether all of a text has tokens. One without is an unknown-token, or missing bytes of a character."""
    unknown = tokenizer.special_tokens.get("unk_token")
    missing = unknown is not None and unknown not in text and tokenizer.encode(unknown, special_tokens=False)[-1] in ids
    return not missing and tokenizer.decode(ids).count("\ufffd") <= text.count("\ufffd")


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], whole: str) -> str:
    """The streamed text; cut short where it is not how the whole text goes on."""
    detokenizer, text = Detokenizer(tokenizer), ""
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        piece = detokenizer.push(ids[start:end])
        if not whole.startswith(piece, len(text)):
            return text
        text += piece
    return text + detokenizer.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[1] / "tests/data")
    parser.add_argument("--model", action="append", help="may be given several times; default: smollm2-135m")
    args = parser.parse_args()

    texts = read_texts(args.prompts)
    began, wrong = time.monotonic(), 0
    columns = ("texts", "tokens", "incomplete", "ids", "decoded", "returned", "streamed")
    print(f"{'model':32}", *(f"{column:>10}" for column in columns))
    for model in args.model or ["smollm2-135m"]:
        counts = compare(resolve(model), texts)
        wrong += counts.wrong()
        print(f"\r{Path(model).name[-32:]:32}", *(f"{getattr(counts, column):10}" for column in columns))
    print(f"{wrong} differences; {time.monotonic() - began:.0f} s")
    return 1 if wrong or not texts else 0


if __name__ == "__main__":
    sys.exit(main())
