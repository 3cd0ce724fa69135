"""What has arrived of one prefill, and whether it may be committed. Pure: knows nothing about grpc or stores.

A commit that passes proves that every byte of every block the decode side lacked arrived exactly once,
undamaged, and under the lease that was asked for: a stale, short or mixed-up stream can never start a decode.
(Of blocks that were copied it proves the same, except that nobody has looked at their bytes: there is no checksum.)
"""

from __future__ import annotations

from bifolio.protos.messages import Commit, Generation, Start

from .wire import Complete, Frame, Malformed, block_count


class Receipt:
    """`add` each frame before its bytes are used, then `check` the commit. Both raise Malformed.

    All frames bring their bytes, or, if `start` has a memory, none does and each stands for a block.
    """

    def __init__(self, start: Start, block_bytes: int) -> None:
        self._start = start
        self._block_bytes = block_bytes
        # Bytes received of each block position. The pieces of a block come in order, so a number says which.
        # Blocks may take turns: that leaves room for sending layer by layer.
        self._filled = [0] * block_count(start)
        self.frames = 0
        self.bytes = 0

    def add(self, frame: Frame | Complete) -> None:
        self._same_lease(frame.generation)
        copied = bool(self._start.memory)
        if isinstance(frame, Complete) != copied:
            raise Malformed(f"a {type(frame).__name__} came where blocks are {'copied' if copied else 'sent'}")
        if frame.index != self.frames:
            raise Malformed(f"frame {frame.index} arrived where frame {self.frames} was due")
        first, end = self._start.skip_blocks, len(self._filled)
        if not first <= frame.position < end:
            raise Malformed(f"frame {frame.index} is of block {frame.position}, asked for {first}..{end - 1}")
        begin, size = (0, self._block_bytes) if isinstance(frame, Complete) else (frame.offset, len(frame.payload))
        filled, stop = self._filled[frame.position], begin + size
        if begin != filled or stop > self._block_bytes:
            raise Malformed(
                f"frame {frame.index} carries bytes {begin}..{stop} of block {frame.position}, "
                f"due were {filled}..{self._block_bytes}"
            )
        self._filled[frame.position] = stop
        self.frames += 1
        self.bytes += size

    def check(self, commit: Commit) -> None:
        self._same_lease(commit.generation)
        start, end = self._start, len(self._filled)
        expected = {
            "tokens": (commit.tokens, len(start.tokens)),
            "first_block": (commit.first_block, start.skip_blocks),
            "block_count": (commit.block_count, end - start.skip_blocks),
            "frames": (commit.frames, self.frames),
            "payload_bytes": (commit.payload_bytes, self.bytes),
        }
        for name, (said, due) in expected.items():
            if said != due:
                raise Malformed(f"the commit says {name} {said}, here it is {due}")
        for position, filled in enumerate(self._filled[start.skip_blocks :], start.skip_blocks):
            if filled != self._block_bytes:
                raise Malformed(f"committed with {filled} of {self._block_bytes} bytes of block {position}")
        if not commit.logits or len(commit.logits) % 4:
            raise Malformed(f"the commit's logits are {len(commit.logits)} bytes, not a row of float32")
        self._check_logprobs(commit)

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
