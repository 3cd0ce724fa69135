from __future__ import annotations

from functools import partial

import torch

from bifolio.replicas.delayed_device import POISON, DelayedDevice
from bifolio.replicas.device import Memory

SEEDS = range(40)


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_computing_happens_in_order_and_at_the_latest_when_its_mark_is_waited_for():
    early = 0
    for seed in SEEDS:
        device, done = DelayedDevice(seed), []
        for i in range(4):
            device.launch(partial(done.append, i))
        early += bool(done)
        mark = device.mark()
        device.launch(partial(done.append, 4))
        mark.wait()
        mark.wait()
        assert done[:4] == [0, 1, 2, 3]
        device.settle()
        assert done == [0, 1, 2, 3, 4]
    assert 0 < early < len(SEEDS)


def test_a_copy_may_happen_before_and_after_computing_and_other_copies():
    found = set()
    for seed in SEEDS:
        device, source = DelayedDevice(seed), bytes_of(1)
        first, second = device.pinned(1), device.pinned(1)
        device.launch(lambda source=source: source.fill_(2))
        device.copy(first, source)
        device.copy(second, source)
        device.settle()
        found.add((int(first), int(second)))
    assert found == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_a_copy_has_happened_when_it_was_waited_for_and_seldom_sooner():
    late = 0
    for seed in SEEDS:
        device = DelayedDevice(seed)
        into = device.pinned(2)
        copied = device.copy(into, bytes_of(1, 2))
        assert into.tolist() in ([1, 2], [POISON, POISON])
        late += device.copies
        copied.wait()
        assert into.tolist() == [1, 2]
        assert device.copies == 0
    assert 0 < late < len(SEEDS)


def test_the_same_seed_gives_the_same_order():
    def order(seed: int) -> list[int]:
        device, done = DelayedDevice(seed), []
        for i in range(5):
            device.launch(lambda i=i: done.append(i))
            device.copy(bytes_of(0), bytes_of(0)).wait()
            done.append(-1)
        return done

    assert [order(seed) for seed in SEEDS] == [order(seed) for seed in SEEDS]
    assert len({tuple(order(seed)) for seed in SEEDS}) > 1


def test_its_memory_is_what_it_is_told_to_be():
    device = DelayedDevice(0, Memory(100, 60))
    assert device.memory() == Memory(100, 60)
    device.says = Memory(100, 40, reserved=20, peak=30)
    device.reset_peak()
    assert device.memory().peak == 30
