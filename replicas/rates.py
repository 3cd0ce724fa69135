"""What a replica measures of itself for those who plan: figures that follow what happened lately.

Pure: knows neither clock nor what is measured. One thread adds, any may look.
"""

from __future__ import annotations

HALF_LIFE_S = 5.0  # of measured time: what was that long before counts half
WEIGHT = 0.2  # of the newest value in an average


class Rate:
    """An amount in a second, over the time that was spent on it; 0 is not yet."""

    def __init__(self) -> None:
        self.value = 0.0
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds
        if self._seconds > 0:
            self.value = self._amount / self._seconds


class Average:
    """Of values that came one after the other; 0 is not yet."""

    def __init__(self) -> None:
        self.value = 0.0
        self._none = True

    def add(self, value: float) -> None:
        self.value = value if self._none else self.value + WEIGHT * (value - self.value)
        self._none = False
