"""What replicas compute on, decided from what is asked for and what the cluster has; refused where it cannot be.

Pure. Knows nodes as Ray describes them, and nothing else of Ray.

    asked for                     the cluster has            a replica takes
    device auto                   no GPU                     the CPU
    device auto, exact or int8    GPUs                       the CPU
    device auto or cuda           4 GPUs, 3 replicas         a whole GPU
    device auto or cuda           1 GPU, 2 replicas          half of one: 1 / ceil(replicas / GPUs)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bifolio.protos.errors import ConfigError
from bifolio.replicas.config import CPU_KERNELS, PoolConfig

from .config import ClusterConfig, validated

WHOLE = 10_000  # Ray counts a GPU in so many parts
MOST_SHARES = 128  # a GPU is not cut into more on its own account
_ACCELERATOR = "accelerator_type:"  # how Ray begins the name of the resource
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    gpus: int = 0
    accelerator_types: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: Mapping[str, float], labels: Mapping[str, str]) -> Node:
        """As Ray describes it."""
        types = {name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)}
        return cls(int(resources.get("GPU", 0)), frozenset(types), labels)


@dataclass(frozen=True, slots=True)
class _Need:
    """GPUs that a pool asks for; `parts` of one for each replica, None while it is open."""

    role: str
    replicas: int
    parts: int | None
    places: frozenset[int]  # the nodes that will do

    @property
    def share(self) -> float:
        assert self.parts is not None, "the share is decided"
        return self.parts / WHOLE


def on_devices(config: ClusterConfig, nodes: Sequence[Node]) -> ClusterConfig:
    """A new configuration in which device, what depends on it, and every `num_gpus` are decided.

    ConfigError says what was asked for, what there is, and what to do.
    """
    gpus = sum(node.gpus for node in nodes)
    device, source = _device(config, gpus)
    tree: dict[str, Any] = config.model_dump(exclude_unset=True)
    tree.setdefault("engine", {})["device"] = device
    decided = validated(tree, source)
    places = {role: _places(role, pool, nodes, device) for role, pool in decided.pools.used.items()}
    if device == "cpu":
        return decided
    needs = [
        _Need(role, decided.pools.wanted[role], None if pool.num_gpus is None else round(pool.num_gpus * WHOLE), where)
        for (role, pool), where in zip(decided.pools.used.items(), places.values(), strict=True)
    ]
    # Pools that share no node do not take from each other
    apart = len(needs) == 2 and not needs[0].places & needs[1].places
    for group in [[need] for need in needs] if apart else [needs]:
        for need in _shared(group, nodes):
            tree.setdefault("pools", {}).setdefault(need.role, {})["num_gpus"] = need.share
    return validated(tree, source)


def describe(config: ClusterConfig, nodes: Sequence[Node]) -> str:
    """What was decided, in a line."""
    if config.engine.device == "cpu":
        return "device cpu"
    gpus, used = sum(node.gpus for node in nodes), config.pools.used
    wanted = {role: f"{config.pools.wanted[role]} {role}" for role in used}
    takers: dict[str, list[str]] = {}
    for role, pool in used.items():
        takers.setdefault(_part(pool.num_gpus or 1, gpus), []).append(wanted[role])
    several = sum(config.pools.wanted.values()) > 1
    each = "each of " if several else ""
    parts = ", ".join(f"{part} for {each}{' and '.join(pools)}" for part, pools in takers.items())
    last = config.pools.decode.replicas
    return f"device cuda: {_gpus(gpus)}, {parts} replica{'s' * (last > 1)}"


def _device(config: ClusterConfig, gpus: int) -> tuple[str, str]:
    """cuda or cpu, and how that came about, to begin a message with."""
    engine = config.engine
    if engine.device == "cuda" and not gpus:
        raise ConfigError(
            "engine.device is cuda, and the cluster has no GPU; set it to auto or cpu, or start where `nvidia-smi` "
            "shows one"
        )
    if engine.device != "auto":
        return engine.device, f"engine.device {engine.device}"
    of_the_cpu = {
        "engine.exact": engine.exact,
        f"model.quantization {config.model.quantization}": config.model.quantization is not None,
        f"engine.kernels {engine.kernels}": engine.kernels in CPU_KERNELS,
        "the cluster has no GPU": not gpus,
    }
    for reason, holds in of_the_cpu.items():
        if holds:
            return "cpu", f"engine.device auto is cpu here ({reason})"
    return "cuda", f"engine.device auto is cuda here ({_gpus(gpus)})"


def _places(role: str, pool: PoolConfig, nodes: Sequence[Node], device: str) -> frozenset[int]:
    """Where the pool's replicas may run: indices of nodes."""
    usable = {i: node for i, node in enumerate(nodes) if node.gpus or device == "cpu"}
    kind, a_node = pool.accelerator_type, "no node" if device == "cpu" else "no node with a GPU"
    if kind is not None and not any(kind in node.accelerator_types for node in usable.values()):
        there = sorted({name for node in usable.values() for name in node.accelerator_types})
        raise ConfigError(
            f"pools.{role}.accelerator_type is {kind}, and {a_node} has that; there are: {_listed(there)}; set it to "
            "one of them, or to null"
        )
    asked = set(pool.labels.items())
    found = frozenset(
        i
        for i, node in usable.items()
        if asked <= set(node.labels.items()) and (kind is None or kind in node.accelerator_types)
    )
    if not found:
        pairs = {pair for node in usable.values() for pair in node.labels.items() if pair[0] != _NODE_ID}
        raise ConfigError(
            f"pools.{role}.labels asks for {_labels(asked)}{f' with accelerator_type {kind}' if kind else ''}, and "
            f"{a_node} has all of that; there are: {_labels(pairs)}"
        )
    return found


def _shared(needs: Sequence[_Need], nodes: Sequence[Node]) -> list[_Need]:
    """What was left open is the largest 1/k of a GPU, the same for all, with which everything has its place."""
    for cut in range(1, MOST_SHARES + 1):
        tried = [replace(need, parts=WHOLE // cut) if need.parts is None else need for need in needs]
        if _fit(tried, nodes):
            return tried
        if tried == needs:
            break
    fixed = [need for need in needs if need.parts is not None]
    summed = sum(need.replicas * (need.parts or 0) for need in fixed) / WHOLE
    terms = " + ".join(f"{need.replicas} {need.role} x {need.share:g}" for need in fixed)
    gpus = sum(nodes[i].gpus for i in frozenset().union(*(need.places for need in needs)))
    has = f"the cluster has {gpus}" if gpus == sum(node.gpus for node in nodes) else f"their nodes have {gpus}"
    rest = [f"{need.replicas} {need.role}" for need in needs if need.parts is None]
    if rest:
        problem = f", and nothing is left for {' and '.join(rest)}"
    elif summed <= gpus:
        problem = "; a replica's share lies whole on one GPU of its nodes, and so they do not all fit"
    else:
        problem = ""
    raise ConfigError(
        f"the pools need more GPUs than there are: {terms} = {summed:g}, {has}{problem}; set fewer replicas or a "
        "smaller num_gpus, or leave num_gpus null and they share"
    )


def _fit(needs: Sequence[_Need], nodes: Sequence[Node]) -> bool:
    """Whether all replicas find a place, each whole on one GPU. Exact: for any number of the first pool's replicas on
    the GPUs so far, `most` is how many of the second's find room beside them.
    """
    first, second = (*needs, _Need("", 0, WHOLE, frozenset()))[:2]
    assert first.parts is not None, "the share is decided"
    assert second.parts is not None, "the share is decided"
    most = {0: 0}
    for index, node in enumerate(nodes):
        fit = WHOLE // first.parts if index in first.places else 0
        for _ in range(min(node.gpus, first.replicas + second.replicas)):
            after: dict[int, int] = {}
            for placed, beside in most.items():
                for here in range(min(fit, first.replicas - placed) + 1):
                    left = WHOLE - here * first.parts
                    there = beside + (left // second.parts if index in second.places else 0)
                    after[placed + here] = max(after.get(placed + here, 0), there)
            most = after
    return most.get(first.replicas, -1) >= second.replicas


def _part(share: float, gpus: int) -> str:
    of = "it" if gpus == 1 else "one"
    if share == 1:
        return "all of it" if gpus == 1 else "one"
    return f"half of {of}" if share == 0.5 else f"{share:g} of {of}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _labels(pairs: set[tuple[str, str]]) -> str:
    return _listed([f"{name}={value}" for name, value in sorted(pairs)])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "") if names else "none"
