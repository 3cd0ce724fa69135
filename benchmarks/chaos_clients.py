"""What clients do to a cluster: they leave at every stage, in every way, and they come all at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from chaos_faults import Hit, Scene
from chaos_load import DOORS, Asked, Door, How, Kind, Question

STAGE_S = 4.0  # after which they leave, wherever they are
LOOK_S = 0.03
FEW = 8  # characters that one who leaves while it decodes has read
LAST = 8  # and that one who leaves at the end has not

Stage = Literal["waiting", "queued", "prefill", "transfer", "decode", "last"]
Way = tuple[Door, How]
STAGES: tuple[Stage, ...] = ("waiting", "queued", "prefill", "transfer", "decode", "last")
WAYS: tuple[Way, ...] = (
    ("http", "close"),
    ("http reset", "close"),
    ("grpc", "close"),
    ("http", "cancel"),
    ("grpc", "cancel"),
)

# Between one who leaves and the next, all of whom began at once: what of a stage is short is met by one of them
APART_S: dict[Stage, float] = {"waiting": 0.0, "queued": 0.005, "prefill": 0.02, "transfer": 0.04}


@dataclass(frozen=True)
class Leave:
    """Some clients begin, and leave at one stage."""

    stage: Stage
    way: Way
    count: int

    @property
    def kind(self) -> str:
        return f"leave {self.stage}"

    async def strike(self, scene: Scene) -> Hit:
        if self.stage in ("decode", "last"):
            asked = [self._ask(scene, scene.load.next("stream")) for _ in range(self.count)]
            await asyncio.gather(*(self._once_reached(scene, each) for each in asked))
        else:
            leaving: list[asyncio.Task[None]] = []
            asked = [self._ask(scene, scene.load.next("long")) for _ in range(self.count)]
            if self.stage == "waiting":
                await self._until_some_wait(scene)
            for each in asked:
                await asyncio.sleep(APART_S[self.stage])
                leaving.append(asyncio.create_task(scene.load.leave(each, self.way[1])))
            await asyncio.gather(*leaving)
        left = sum(each.outcome.status != "ok" for each in asked)  # the others were answered before
        return Hit(f"{left} of {self.count} over {self.way[0]} by {self.way[1]}")

    def _ask(self, scene: Scene, question: Question) -> Asked:
        last = scene.load.expected[question.number].characters - LAST
        return scene.load.ask(question, self.way[0], last if self.stage == "last" else FEW)

    async def _once_reached(self, scene: Scene, asked: Asked) -> None:
        reached = asyncio.create_task(asked.reached.wait())
        await asyncio.wait({reached, asked.task}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        await scene.load.leave(asked, self.way[1])

    async def _until_some_wait(self, scene: Scene) -> None:
        """Theirs or others'; they leave at last even if nobody has to."""
        deadline = asyncio.get_running_loop().time() + STAGE_S
        while asyncio.get_running_loop().time() < deadline:
            if (status := await scene.target.status()) and status["waiting"]:
                return
            await asyncio.sleep(LOOK_S)


@dataclass(frozen=True)
class Burst:
    """More long requests at once than the caches hold."""

    count: int

    @property
    def kind(self) -> str:
        return "burst"

    async def strike(self, scene: Scene) -> Hit:
        doors = [DOORS[number // 2 % len(DOORS)] for number in range(self.count)]
        kinds: list[Kind] = ["long" if number % 2 else "stream" for number in range(self.count)]
        asked = [scene.load.ask(scene.load.next(kind), door) for kind, door in zip(kinds, doors, strict=True)]
        await asyncio.wait({each.task for each in asked})
        return Hit(f"{self.count} requests")
