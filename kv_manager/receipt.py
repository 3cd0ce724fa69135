"""What has arrived of one prefill, and whether it may be committed. Pure: knows nothing about grpc or stores.

A commit that passes proves that every byte of every block the decode side lacked arrived exactly once,
undamaged, and under the lease that was asked for: a stale, short or mixed-up stream can never start a decode.
(Of blocks that were copied it proves the same, except that nobody has looked at their bytes: there is no checksum.)

Of each part (`heads.py`) what comes is one run of bytes, through all blocks that were asked for, in their order.
Parts may take turns.
"""

from __future__ import annotations

from bifolio.protos.messages import Commit, Generation, Heads, Start

from .heads import cover, overlap
from .wire import Complete, Frame, Malformed, block_count


class Receipt:
    """`add` each frame before its bytes are used, then `check` the commit. Both raise Malformed.

    All frames bring their bytes, or, if `start` has a memory, none does and each stands for whole blocks.
    """

    def __init__(self, start: Start, block_bytes: int, vocabulary: int | None = None) -> None:
        """`block_bytes` of all heads; None: a vocabulary that is not known."""
        self._start = start
        self._block_bytes = block_bytes
        self._vocabulary = vocabulary
        self._all = Heads(0, start.geometry.kv_heads)
        self._end = block_count(start)
        self._runs: dict[Heads, int] = {}  # bytes received of each part
        self.frames = 0
        self.bytes = 0

    def part_bytes(self, heads: Heads) -> int:
        """What these heads take of a block."""
        return self._block_bytes * heads.count // self._all.count

    def add(self, frame: Frame | Complete) -> int:
        """Gives the bytes that the frame brings, or stands for."""
        self._same_lease(frame.generation)
        copied = bool(self._start.memory)
        if isinstance(frame, Complete) != copied:
            raise Malformed(f"a {type(frame).__name__} came where blocks are {'copied' if copied else 'sent'}")
        if frame.index != self.frames:
            raise Malformed(f"frame {frame.index} arrived where frame {self.frames} was due")
        first = self._start.skip_blocks
        if not first <= frame.position < self._end:
            raise Malformed(f"frame {frame.index} is of block {frame.position}, asked for {first}..{self._end - 1}")
        if isinstance(frame, Frame):
            heads, offset, size = frame.heads, frame.offset, len(frame.payload)
        else:
            heads, offset, size = self._all, 0, frame.count * self._block_bytes
        run, block = self._run_of(heads, frame.index), self.part_bytes(heads)
        at, end = (frame.position - first) * block + offset, (self._end - first) * block
        if offset >= block or at != run or not 0 < size <= end - at:
            raise Malformed(
                f"frame {frame.index} carries {size} bytes from {offset} of block {frame.position}, heads {heads}; due "
                f"were at most {end - run} from {run % block} of block {first + run // block}"
            )
        self._runs[heads] = at + size
        self.frames += 1
        self.bytes += size
        return size

    def check(self, commit: Commit) -> None:
        self._same_lease(commit.generation)
        start, end = self._start, self._end
        if not commit.geometry.fits(start.geometry):
            raise Malformed(f"the commit is of blocks of [{commit.geometry}], asked for were [{start.geometry}]")
        if commit.layers != start.geometry.layer_names:
            raise Malformed(
                f"the commit is of layers {_named(commit.layers)}, due {_named(start.geometry.layer_names)}"
            )
        if not cover(commit.heads, start.geometry.kv_heads) or not self._runs.keys() <= set(commit.heads):
            came = ", ".join(map(str, sorted(self._runs))) or "none"
            said = ", ".join(map(str, commit.heads)) or "none"
            raise Malformed(f"the commit is of heads {said}; what came is of {came}, and there are {self._all}")
        expected = {
            "tokens": (commit.tokens, len(start.tokens)),
            "first_block": (commit.first_block, start.skip_blocks),
            "block_count": (commit.block_count, end - start.skip_blocks),
            "frames": (commit.frames, self.frames),
            "payload_bytes": (commit.payload_bytes, self.bytes),
        }
        for name, (said_, due) in expected.items():
            if said_ != due:
                raise Malformed(f"the commit says {name} {said_}, here it is {due}")
        for heads in commit.heads:
            run, due = self._runs.get(heads, 0), (end - start.skip_blocks) * self.part_bytes(heads)
            if run != due:
                raise Malformed(f"committed with {run} of {due} bytes of heads {heads}")
        row, odd = divmod(len(commit.logits), 4)
        if not row or odd or row != (self._vocabulary or row):
            of = "" if self._vocabulary is None else f" of {self._vocabulary} tokens"
            raise Malformed(f"the commit's logits are {len(commit.logits)} bytes, not a row of float32{of}")
        self._check_logprobs(commit)

    def _run_of(self, heads: Heads, index: int) -> int:
        """The bytes that came of this part; 0 of a new one, which has no head of another."""
        if (run := self._runs.get(heads)) is not None:
            return run
        if heads.count < 1 or overlap(heads, self._all) != heads:
            raise Malformed(f"frame {index} is of heads {heads}, there are {self._all}")
        for other in self._runs:
            if overlap(heads, other).count > 0:
                raise Malformed(f"frame {index} is of heads {heads}, after some of heads {other}")
        return 0

    def _check_logprobs(self, commit: Commit) -> None:
        """They are of the prompt's tokens, with as many most probable ones as were asked for."""
        asked, got = self._start.prompt_logprobs, commit.prompt_logprobs
        due = () if asked is None else self._start.tokens[1:]
        if tuple(one.token for one in got) != due:
            raise Malformed(f"the commit has logprobs of {len(got)} tokens, due were those of {len(due)} of the prompt")
        most = min(asked or 0, len(commit.logits) // 4)
        if any(len(one.top) != most for one in got):
            raise Malformed(f"the commit has logprobs without the {most} most probable tokens at their place")

    def _same_lease(self, generation: Generation) -> None:
        if generation != self._start.generation:
            raise Malformed(f"content of lease {generation} in the stream of lease {self._start.generation}")


def _named(layers: tuple[str, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}, {len(layers)} in all" if layers else "none"
