"""How far two ways of computing the same logits are apart. Pure: rows of numbers in, counts out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]  # [vocabulary], or a row for each token
# What a way is compared with: the prompt whole and alone; the same steps, not recorded; another dtype and device
Against = Literal["alone", "eager", "float32"]


@dataclass(slots=True)
class Way:
    """How often a way of computing came to the logits it is compared with, and how near it came where it did not."""

    name: str
    against: Against = "alone"
    compared: int = 0  # rows of logits, one for each token
    equal: int = 0  # all bits of the row
    flips: int = 0  # rows that choose another token
    largest: float = 0.0  # absolute difference of two logits
    summed: float = 0.0  # absolute differences of all logits in rows with other bits
    logits: int = 0  # how many these are

    @property
    def mean(self) -> float:
        """Absolute difference of two logits, in rows with other bits."""
        return self.summed / self.logits if self.logits else 0.0

    @property
    def flip_rate(self) -> float:
        return self.flips / self.compared if self.compared else 0.0

    def count(self, ours: Iterable[Logits], theirs: Iterable[Logits]) -> None:
        """Row by row; as many of the one as of the other."""
        for a, b in zip(ours, theirs, strict=True):
            self.compared += 1
            if np.array_equal(a.view(np.uint32), b.view(np.uint32)):
                self.equal += 1
                continue
            self.flips += bool(a.argmax() != b.argmax())
            apart = np.abs(a.astype(np.float64) - b)
            self.largest = max(self.largest, float(apart.max()))
            self.summed += float(apart.sum())
            self.logits += apart.size

    def fresh(self) -> Way:
        """The same way, nothing compared yet."""
        return Way(self.name, self.against)

    def add(self, other: Way) -> None:
        """What it came to on other prompts."""
        assert (self.name, self.against) == (other.name, other.against)
        self.compared += other.compared
        self.equal += other.equal
        self.flips += other.flips
        self.largest = max(self.largest, other.largest)
        self.summed += other.summed
        self.logits += other.logits
