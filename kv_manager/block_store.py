"""`BlockStore`: the bytes of one replica's blocks, as the transfer sees them, wherever they lie.

The seam between the protocol and a cache: so the one is tested without torch, and the other without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

from bifolio.protos.messages import BlockId, Generation

Span = tuple[BlockId, int, int]  # a block, its first byte and the byte after the last
Cut = Sequence[Span]  # what one frame carries: at most wire.MAX_PAYLOAD bytes
Write = Callable[[BlockId, int, memoryview | bytes], None]  # a block, its first byte, at most MAX_PAYLOAD of data

# Copies a block of another store, last written under that generation, into a block of this one. StalePlacement if the
# other was written under a later one before the copy was done.
Copy = Callable[[BlockId, Generation, BlockId], None]

WhyNot = Literal["off", "none", "elsewhere", "hidden", "gone", "misfit", "short"]


class Unreached(NamedTuple):
    """Why blocks are sent where they might be copied: in a word, to be counted, and in a sentence."""

    reason: WhyNot
    why: str

    def __str__(self) -> str:
        return self.why


class BlockStore(Protocol):
    """Different blocks may be used from different threads at once; what one of the calls below gives is used by one
    thread, except a `Copy`."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def memory(self) -> bytes:
        """The handle by which others `reach` this store's memory, the same from then on. Empty: they do not."""

    def read(self, cuts: Sequence[Cut]) -> Generator[Sequence[memoryview]]:
        """The bytes of each cut in turn, in views that follow each other: one-dimensional, contiguous, format B.

        The views hold until the next are asked for, or the generator is closed. It waits for what was launched to
        compute them, and may read ahead: so ask only for what has been launched. Close it, under the lease that it
        reads from: then it touches neither blocks nor buffers any more.
        """

    def writing(self) -> AbstractContextManager[Write]:
        """A function that writes. It has copied its data when it returns: so a frame may then be acknowledged.

        What was written is in the blocks once the context has been left, however it is left. No sooner may they be
        read, or given to someone else.
        """

    def settle(self, blocks: Sequence[BlockId]) -> None:
        """Returns when all that was computed into these blocks is there, for those who reach the memory."""

    def own(self, blocks: Iterable[BlockId], generation: Generation) -> None:
        """From now on these blocks may be written under this lease: to be called before anything is, and seen by those
        who copy them."""

    def owner(self, block: BlockId) -> Generation:
        """The lease under which a block may be, or was last, written; (0, 0) is never."""

    def reach(self, memory: bytes) -> Copy | Unreached:
        """A function that copies whole blocks from the store of that handle, or why this one cannot. Any bytes may be
        tried. The copy has happened when the function returns, or raises. It holds the memory as long as it exists."""
