"""Helps with a misspelt name. Knows nothing of what is named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that `given` was most likely meant to be, if one is near."""
    found = difflib.get_close_matches(given, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def suggest(given: str, names: Iterable[str]) -> str:
    """'did you mean X? allowed: …', to end a sentence that says what was given."""
    names = sorted(names)
    near = nearest(given, names)
    return (f"did you mean {near}? " if near else "") + f"allowed: {', '.join(names)}"
