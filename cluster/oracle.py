"""Another implementation's opinion: transformers on the same weights, in float32 or the dtype asked for.

transformers is not a dependency; where it is missing, `load` says so.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bifolio.protos.errors import Unavailable

TIE = 2e-4  # of float32 logits: two implementations round differently, and neither is wrong


@dataclass(slots=True)
class Verdict:
    """Tokens of greedy answers against the oracle's own choice at the same place, teacher-forced."""

    equal: int = 0
    ties: int = 0  # another token, but the oracle's logits of the two are closer than TIE
    mismatches: int = 0

    @property
    def compared(self) -> int:
        return self.equal + self.ties + self.mismatches


class Oracle:
    """A model that transformers has loaded."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def load(cls, source: Path, dtype: str = "float32") -> Oracle:
        """Raises Unavailable, with the reason, where transformers is missing or cannot read the model."""
        try:
            import torch
            import transformers

            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            where = {"gguf_file": source.name} if source.is_file() else {}
            directory = source.parent if source.is_file() else source
            with contextlib.redirect_stderr(io.StringIO()):  # bars that no setting turns off
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    directory, dtype=getattr(torch, dtype), **where
                )
        except ImportError as error:
            raise Unavailable(f"{error}; pip install transformers accelerate") from error
        except Exception as error:  # whatever another project's loader raises
            raise Unavailable(f"transformers cannot read {source}: {error}") from error
        return cls(model.eval())

    def judge(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        verdict: Verdict,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Count the answer's tokens into `verdict`; each one that differs is a line for `report`."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :].float()
        best = logits.argmax(-1).tolist()
        for position, token in enumerate(answer):
            if best[position] == token:
                verdict.equal += 1
                continue
            gap = float(logits[position, best[position]] - logits[position, token])
            if gap < TIE:
                verdict.ties += 1
            else:  # or no number at all
                verdict.mismatches += 1
            report(f"position {position}: {token} here, {best[position]} in transformers, gap {gap:.1e}")
