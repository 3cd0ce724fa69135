"""A replica's process for tests: its tags, and beside them a second record, kept the simplest way there is.

The record says for each block what was last written whole there, and for each lease which tokens it computes, how far
it is and which blocks it may write. What is asserted here must hold however wrong the ledger is: a block is written by
one open lease while no other has it, except the forks that wait for it; what is shared is never written; a hit holds
what it is said to hold; blocks come back once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ledger_kit import GEOMETRY, keys_of

from bifolio.kv_manager.tags import NEVER, BlockTags
from bifolio.protos.messages import BlockId, Generation, Key, Lease, Release, ReplicaInfo, Reply, Report

Tokens = tuple[int, ...]


@dataclass
class Job:
    """What is computed under an open lease. `tokens` grow as they are generated."""

    lease: Lease  # as it was placed
    blocks: list[BlockId]
    tokens: Tokens
    prompt: int  # how many of them were there at the beginning
    most: int  # positions it may ever occupy
    choice: int
    computed: int = 0  # positions that are written
    waits: Generation | None = None  # a fork: for whom computes the prompt


@dataclass
class RecordedReplica:
    info: ReplicaInfo
    tags: BlockTags
    jobs: dict[Generation, Job] = field(default_factory=dict)
    content: dict[BlockId, Tokens] = field(default_factory=dict)  # all tokens up to the end of a whole block
    reserve: set[BlockId] = field(default_factory=set)
    newest: dict[BlockId, Generation] = field(default_factory=dict)  # that opened with it, to write
    copies: set[BlockId] = field(default_factory=set)  # what they hold was whole in another block already

    @classmethod
    def of(cls, info: ReplicaInfo) -> RecordedReplica:
        return cls(info, BlockTags(info.id, info.blocks, grows=info.role == "decode"))

    @property
    def size(self) -> int:
        return GEOMETRY.block_size

    def readers(self, block: BlockId) -> list[Generation]:
        return [generation for generation, job in self.jobs.items() if block in job.blocks]

    # -- leases

    def open(self, lease: Lease, tokens: Tokens, most: int, choice: int = 0) -> None:
        """StalePlacement as the tags say; then nothing has changed."""
        self.tags.open(lease, keys_of(tokens))
        for i, block in enumerate(lease.blocks[: lease.cached]):
            assert self.content.get(block) == tokens[: (i + 1) * self.size], "a hit of something else"
        assert lease.cached * self.size < len(tokens), "the last token is computed, always"
        self._begin(Job(lease, list(lease.blocks), tokens, len(tokens), most, choice, lease.cached * self.size))

    def fork(self, lease: Lease, parent: Generation, choice: int) -> None:
        self.tags.fork(lease, parent)
        of = self.jobs[parent]
        assert lease.cached == of.prompt // self.size, "forks share what the prompt fills"
        assert lease.blocks[: lease.cached] == tuple(of.blocks[: lease.cached])
        done = lease.cached * self.size
        self._begin(Job(lease, list(lease.blocks), of.tokens[: of.prompt], of.prompt, of.most, choice, done, parent))

    def _begin(self, job: Job) -> None:
        generation, own = job.lease.generation, job.blocks[job.lease.cached :]
        assert generation not in self.jobs, "a lease opened twice"
        for block in own:
            assert not self.readers(block), "granted to be written while another lease has it"
            assert block not in self.reserve, "leased and in the reserve"
            assert self.newest.get(block, NEVER) < generation, "opened after its time"
            self._granted(block, generation)
        self.jobs[generation] = job

    def _granted(self, block: BlockId, generation: Generation) -> None:
        self.newest[block] = generation
        self.content.pop(block, None)
        self.copies.discard(block)

    def close(self, generation: Generation) -> Release:
        """Says what is whole, generated tokens too, then closes."""
        self.fill(generation)
        self.jobs.pop(generation)
        release = self.tags.close(generation)
        assert release is not None
        assert release.generation == generation
        return release

    # -- computing

    def compute(self, generation: Generation, positions: int) -> None:
        """So many more of the prompt; a fork has it computed by whom it waits for. Then tokens are generated, as long
        as there are blocks."""
        job = self.jobs[generation]
        if job.waits is not None:
            job = self.jobs[job.waits]
        if job.computed < job.prompt:
            self._write(job, min(job.prompt, job.computed + positions))
            self.fill(job.lease.generation)
            if job.computed == job.prompt:
                for fork in self.jobs.values():
                    if fork.waits == job.lease.generation:
                        fork.waits = None
                        self._write(fork, fork.prompt)  # its copy of the last block, if that is not full
            return
        if self.info.role == "prefill":
            return
        for _ in range(positions):
            if job.computed == job.most:
                break
            if len(job.tokens) == job.computed:  # sampled
                job.tokens += (100 + 10 * job.choice + job.computed % 2,)
            if job.computed == len(job.blocks) * self.size and not self.draw(job.lease.generation, 1):
                break
            self._write(job, job.computed + 1)

    def draw(self, generation: Generation, n: int) -> bool:
        drawn = self.tags.draw(generation, n)
        if drawn is None:
            assert len(self.reserve) < n, "there were enough"
            return False
        assert len(drawn) == n
        for block in drawn:
            assert block in self.reserve, "drawn, and never granted"
            assert not self.readers(block), "drawn while another lease has it"
            self.reserve.remove(block)
            self._granted(block, NEVER)
        self.jobs[generation].blocks.extend(drawn)
        return True

    def _write(self, job: Job, to: int) -> None:
        mine = job.lease.generation
        for position in range(job.computed, to):
            place = position // self.size
            block = job.blocks[place]
            assert place >= job.lease.cached, "what is shared is never written"
            assert block not in self.content, "written again, though it is whole"
            others = [g for g in self.readers(block) if g != mine]
            assert all(self.jobs[g].waits == mine for g in others), "written while another lease has it"
            if (position + 1) % self.size == 0:
                whole = job.tokens[: position + 1]
                if whole in self.content.values():
                    self.copies.add(block)
                self.content[block] = whole
        job.computed = to

    def fill(self, generation: Generation) -> None:
        job = self.jobs[generation]
        if job.waits is None:
            whole = job.tokens[: job.computed]
            self.tags.fill(generation, keys_of(whole))

    # -- reports

    def report(self, now: float, *, complete: bool = False) -> Report:
        report = self.tags.report(now, complete=complete)
        assert set(report.reserve) <= self.reserve, "invented"
        self.reserve = set(report.reserve)
        self.check(report)
        return report

    def apply(self, reply: Reply) -> tuple[Generation, ...]:
        counts = reply.beat == self.tags.beat and reply.granted is not None
        before = self.tags.held
        revoked = self.tags.apply(reply)
        assert set(revoked) <= set(self.jobs)
        if counts and reply.granted and self.tags.held > before:
            for block in reply.granted.blocks:
                if not self.readers(block):
                    assert block not in self.reserve
                    self.reserve.add(block)
                    self._granted(block, reply.granted.generation)
        return revoked

    # -- both records agree

    @property
    def held(self) -> int:
        return len({block for job in self.jobs.values() for block in job.blocks} | self.reserve)

    def cached(self) -> dict[BlockId, Key]:
        """The tags' keys, checked against the record."""
        every = [BlockId(b) for b in range(1, self.info.blocks + 1)]
        found = {block: key for block in every if (key := self.tags.key(block)) is not None}
        for block, key in found.items():
            assert keys_of(self.content[block])[-1] == key, "a key of something else"
        return found

    def check(self, report: Report | None = None) -> None:
        assert self.tags.held == self.held
        for block in range(1, self.info.blocks + 1):
            assert set(self.tags.users(BlockId(block))) == set(self.readers(BlockId(block)))
        self.cached()
        if report is not None:
            assert report.held == self.held
            listed = {lease.generation: list(lease.blocks) for lease in report.leases}
            assert listed == {generation: job.blocks for generation, job in self.jobs.items()}
