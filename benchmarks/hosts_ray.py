"""Hosts that are Ray nodes of `ray.cluster_utils`: one address for all, so no links, and no rights are needed.

with ray_nodes({"head": {}, "d0": {"pool": "decode"}}, doors) as hosts:
    hosts.kill("d0"); hosts.revive("d0")
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hosts import QUICK_DEATH, STORE, Labels, undertaker

from bifolio.cluster.local import environment


class RayNodes:
    """Made by `ray_nodes`."""

    def __init__(self, directory: Path, mark: str, hosts: Mapping[str, Labels], doors: Collection[int]) -> None:
        self.names = tuple(hosts)
        self.head = self.names[0]
        self._directory, self._labels = directory, dict(hosts)
        self._common = environment(directory / "HOST", mark, doors) | QUICK_DEATH
        os.environ.update(self.environment(self.head))  # Ray reads it when it is imported, and here too
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=False)  # that takes the main thread, and the undertaker's work
        self._nodes: dict[str, Any] = {}
        for name in self.names:
            self._add(name)
        self.address = str(self._cluster.address)

    def ip(self, name: str) -> str:
        return str(self._nodes[name].node_ip_address)

    def environment(self, name: str) -> dict[str, str]:
        return {**os.environ, **{key: value.replace("HOST", name) for key, value in self._common.items()}}

    def inside(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def alive(self, name: str) -> bool:
        return name in self._nodes

    def kill(self, name: str) -> Collection[int]:
        """Of this node's processes nothing is known but that they end."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)
        return ()

    def revive(self, name: str) -> None:
        if not self.alive(name):
            self._add(name)

    def _add(self, name: str) -> None:
        one = {} if self._nodes else {"include_dashboard": False, "temp_dir": str(self._directory / "ray")}
        variables = {key: value.replace("HOST", name) for key, value in self._common.items() if "HOST" in value}
        self._nodes[name] = self._cluster.add_node(
            num_cpus=1,
            object_store_memory=STORE,
            labels={"host": name, **self._labels[name]},
            env_vars=variables,
            **one,
        )


@contextlib.contextmanager
def ray_nodes(hosts: Mapping[str, Labels], doors: Collection[int] = ()) -> Iterator[RayNodes]:
    """The first is the head. Once in a process, before it imports Ray."""
    assert "ray" not in sys.modules, "Ray reads its environment when it is imported"
    mark, directory = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="bfh-"))
    with undertaker(mark, directory, ""):
        yield RayNodes(directory, mark, hosts, doors)
