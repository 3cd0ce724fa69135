"""The judgement on a run with faults: what every request got, held against what it gets when nothing disturbs it.

Pure: a history in, a verdict out. An answer that ended must be equal, over gRPC in its ids too;
whatever came of one that did not must be how the undisturbed one begins. Only where an ingress died may streams break.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chaos_load import Outcome

SLACK_S = 0.5  # between a death and when we wrote down that it began


@dataclass(frozen=True)
class Strike:
    """A fault that struck. Times are by time.monotonic, as in outcomes."""

    number: int
    kind: str
    whom: str
    at: float
    until: float | None  # the cluster was whole again; None: never
    breaks: bool = False  # an ingress has died of it,
    broken_by: float | None = None  # and its streams broke until then; None: until the cluster was whole again

    @property
    def seconds(self) -> float | None:
        return None if self.until is None else self.until - self.at

    def touched(self, outcome: Outcome) -> bool:
        """It was under way at some time between the fault and its end."""
        return _overlap(outcome, self.at, self.until)

    def excuses(self, outcome: Outcome) -> bool:
        """It may have broken because an ingress died."""
        end = self.until if self.broken_by is None else self.broken_by
        return self.breaks and _overlap(outcome, self.at, end) and (end is None or (outcome.ended or 0) <= end)


@dataclass(frozen=True)
class Result:
    """A whole run."""

    expected: Mapping[int, Outcome]  # by question, undisturbed
    outcomes: Sequence[Outcome]
    strikes: Sequence[Strike]
    left: Sequence[str] = ()  # what the cluster holds with nothing to do, in words
    leaked: int = 0  # blocks of it
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """Of the faults of one kind. A request counts at each fault during which it was under way; one that broke, where an
    ingress died."""

    kind: str
    count: int
    open: int  # when they struck
    resumed: int
    broken: int
    refused: int
    hung: int
    wrong: int
    median: float | None  # seconds until the cluster was whole again
    longest: float | None


@dataclass
class Verdict:
    rows: list[Row] = field(default_factory=list)
    ok: int = 0
    resumed: int = 0
    left: int = 0  # by their own wish
    refused: int = 0
    broken: int = 0  # where an ingress died
    torn: list[str] = field(default_factory=list)  # broken, and no ingress died: these all are complaints
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    never: list[str] = field(default_factory=list)  # the cluster was not whole again
    leaked: int = 0

    @property
    def complaints(self) -> list[str]:
        return [*self.wrong, *self.hung, *self.torn, *self.failed, *self.never, *self.leaks]

    @property
    def met(self) -> bool:
        return not self.complaints and not self.leaked


def judge(result: Result) -> Verdict:
    verdict = Verdict(leaks=[f"left at the end: {each}" for each in result.left], leaked=result.leaked)
    wrong: set[str] = set()
    for outcome in result.outcomes:
        if difference := compare(outcome, result.expected[outcome.question]):
            verdict.wrong.append(f"{_named(outcome)}: {difference}")
            wrong.add(outcome.id)
        match outcome.status:
            case "ok":
                verdict.ok += 1
                verdict.resumed += outcome.resumes > 0
            case "left" | "cancelled":
                verdict.left += 1
            case "refused":
                verdict.refused += 1
            case "broken":
                if _excused(outcome, result.strikes):
                    verdict.broken += 1
                else:
                    verdict.torn.append(f"{_named(outcome)} broke where no ingress died: {outcome.error}")
            case "failed":
                verdict.failed.append(f"{_named(outcome)} failed: {outcome.error}")
            case "open" | "hung":
                verdict.hung.append(f"{_named(outcome)} hung after {outcome.tokens} tokens: {outcome.error}")
    verdict.never = [
        f"fault {s.number}, {s.kind} {s.whom}: never whole again" for s in result.strikes if s.until is None
    ]
    verdict.rows = list(rows(result, wrong))
    return verdict


def compare(outcome: Outcome, expected: Outcome) -> str | None:
    """What is wrong with an answer, or with as much of it as came."""
    for choice, (said, whole) in enumerate(zip(outcome.said, expected.said, strict=True)):
        complete = outcome.status == "ok" or said.finish is not None
        if outcome.door == "grpc" and (found := _compare_ids(said.ids, whole.ids, complete)):
            return f"choice {choice}: {found}"
        if said.text != (whole.text if complete else whole.text[: len(said.text)]):
            return f"choice {choice}: text {said.text!r} where the undisturbed is {whole.text!r}"
        if complete and said.finish != whole.finish:
            return f"choice {choice}: it ends by {said.finish}, undisturbed by {whole.finish}"
    return None


def _compare_ids(ids: Sequence[int], whole: Sequence[int], complete: bool) -> str | None:
    for place, (got, wanted) in enumerate(zip(ids, whole, strict=False)):
        if got != wanted:
            return f"id {place} is {got}, undisturbed {wanted}"
    if len(ids) > len(whole):
        return f"{len(ids)} ids, undisturbed {len(whole)}"
    return f"{len(ids)} ids of {len(whole)}" if complete and len(ids) < len(whole) else None


def rows(result: Result, wrong: Iterable[str] = ()) -> Iterator[Row]:
    """By kind, in the order in which kinds came first."""
    bad = frozenset(wrong)
    for kind in dict.fromkeys(strike.kind for strike in result.strikes):
        strikes = [strike for strike in result.strikes if strike.kind == kind]
        touched = [outcome for outcome in result.outcomes if any(strike.touched(outcome) for strike in strikes)]
        statuses = Counter(outcome.status for outcome in touched)
        times = [strike.seconds for strike in strikes if strike.seconds is not None]
        yield Row(
            kind,
            count=len(strikes),
            open=sum(outcome.was_open(strike.at) for strike in strikes for outcome in result.outcomes),
            resumed=sum(outcome.status == "ok" and outcome.resumes > 0 for outcome in touched),
            broken=sum(_excused(outcome, strikes) for outcome in touched),
            refused=statuses["refused"],
            hung=statuses["hung"] + statuses["open"],
            wrong=sum(outcome.id in bad for outcome in touched),
            median=statistics.median(times) if times else None,
            longest=max(times, default=None),
        )


def _excused(outcome: Outcome, strikes: Iterable[Strike]) -> bool:
    return outcome.status == "broken" and any(strike.excuses(outcome) for strike in strikes)


def _overlap(outcome: Outcome, begin: float, end: float | None) -> bool:
    return (end is None or outcome.sent <= end) and (outcome.ended is None or outcome.ended >= begin - SLACK_S)


def _named(outcome: Outcome) -> str:
    return f"{outcome.id} (question {outcome.question}, {outcome.door}, {outcome.tokens} tokens)"
