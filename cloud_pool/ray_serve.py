"""A pool on Ray Serve: Serve places, restarts, scales and updates replicas, and each replica is a whole pool.

    serve run cloud_pool.ray_serve:app config=/etc/tidegate/pool.yaml replicas=2

A replica embeds the pool on a port of its own and announces itself over MQTT, so gateways talk to it directly: their
link streams, deadlines and cancellations never pass Serve's proxy, which has a tenth of the throughput. Serve knows a
replica by its health check, which is the pool's own. A replica's name ends with its rank, which Serve gives again to
whoever takes its place: to gateways it is the same target, with what was measured of it. When Serve ends a replica it
drains: it says so at the broker, takes nothing new, and answers what it has. One that begins counts as begun once a
gateway has a link to it, for an update ends the next one in that moment.

Only Serve imports this; docs/ray.md says how to run it, and `tidegate ray-scale` sets the number of replicas.

It can be wrong where two applications of Serve use one `name` at one broker: gateways then use one of the two, and say
so. Serve pickles the class, so what cannot be pickled is imported within its methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ray import serve

_KEYS: Final = "config, replicas, cpus, gpus, memory_bytes"
_MARGIN_S: Final = 10.0  # from the end of the drain to when Serve kills what is left
_HEALTH_S: Final = 2.0  # from one health check to the next
_FOUND_WITHIN_S: Final = 10.0  # by a gateway, ...
_LOOK_S: Final = 0.05  # ... looked for so often


class PoolReplica:
    """One replica, which Serve makes and ends.

    Args:
        path: of the pool's file; "" for none.
        settings: a pool's keys, over those of the file.

    Raises:
        StartError, ConfigError: as `tidegate pool`; Serve shows it as why the replica does not start.
    """

    async def __init__(self, path: str, settings: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        import asyncio

        from ray.util import get_node_ip_address

        from cloud_pool.app import PoolApp
        from tidegate import clock

        rank = serve.get_replica_context().rank
        config = replica_config(path, settings, rank.rank, rank.local_rank, get_node_ip_address())
        self._app = PoolApp(config)
        await self._app.__aenter__()
        self._failed = asyncio.create_task(self._app.failed(), name=f"pool {config.name}")
        ends_at = clock.now() + _FOUND_WITHIN_S  # there may be no gateway
        while not self._app.linked and clock.now() < ends_at:
            await clock.sleep(_LOOK_S)

    def check_health(self) -> None:
        """Raise RuntimeError where the pool has failed, which has Serve put another replica in its place."""
        if self._failed.done():
            raise RuntimeError(f"the pool has failed: {self._failed.exception()}")

    def __call__(self) -> dict[str, Any]:
        """Its name and address, for people and tests: Serve itself knows of no port that a replica opens."""
        return {"name": self._app.config.name, "address": self._app.config.advertise}

    async def __del__(self) -> None:
        """Drain and end; Serve awaits it, for as long as the drain may take."""
        from tidegate.runtime.owned_task import cancel_and_wait

        if hasattr(self, "_failed"):
            await cancel_and_wait(self._failed)
            await self._app.__aexit__(None, None, None)


def replica_config(path: str, settings: Mapping[str, Any], rank: int, local_rank: int, node_address: str) -> Any:
    """The `PoolConfig` of one replica: the file's and the settings', with a name, a port and an address of its own.

    Args:
        rank: among all replicas; local_rank: among those of its node, which share its ports.
        node_address: where gateways reach the node, unless `host` says.

    Raises:
        ConfigError: as `tidegate pool` would.
    """
    from cloud_pool.config import PoolConfig
    from tidegate.config import ConfigError, load
    from tidegate.servers.address import format_address

    config = load(PoolConfig, Path(path) if path else None, **settings)
    if config.mqtt is None:
        raise ConfigError("key 'mqtt': replicas on Ray announce themselves; set the broker, mqtt://host:1883")
    if config.advertise is not None:
        raise ConfigError("key 'advertise': replicas on Ray have an address each; leave it out")
    if config.grpc_port == 0:
        raise ConfigError("key 'grpc_port': replicas on Ray advertise their port; set the first of a free range")
    if config.servers > 1:
        raise ConfigError(
            "key 'servers': on Ray each replica is a server by itself; leave it out, and ask for replicas"
        )
    port = config.grpc_port + local_rank
    own = {"name": f"{config.name}-{rank}", "grpc_port": port, "advertise": format_address(node_address, port)}
    if "host" not in config.model_fields_set:
        own["host"] = node_address
    if config.metrics_port:
        own["metrics_port"] = config.metrics_port + local_rank
    return load(PoolConfig, Path(path) if path else None, **{**settings, **own})


def app(args: Mapping[str, Any]) -> Any:
    """Serve's builder: an application with one deployment, `pool`.

    Args:
        args: `config`: the pool's file, on every node; `replicas` (1): how many at first, which is each time that the
            application is deployed; `cpus` (1), `gpus` (0), `memory_bytes`: what Ray sets aside for each. Ray divides a
            GPU by the books only: where replicas share one, the pool's `memory_limit_bytes` has to hold it. Further
            keys are the pool's own and go before the file's.

    Raises:
        ValueError: a value does not fit, or there is neither a file nor keys.
    """
    given = dict(args)
    path, replicas = str(given.pop("config", "")), int(given.pop("replicas", 1))
    cpus, gpus = float(given.pop("cpus", 1.0)), float(given.pop("gpus", 0.0))
    memory_bytes = int(given.pop("memory_bytes", 0))
    if replicas < 1 or cpus < 0 or gpus < 0 or memory_bytes < 0:
        raise ValueError(f"replicas is at least 1, and cpus, gpus and memory_bytes are not negative; keys: {_KEYS}")
    if not path and not given:
        raise ValueError(f"nothing says what to serve: config=FILE, or the pool's own keys beside {_KEYS}")
    resources = {"num_cpus": cpus, "num_gpus": gpus, **({"memory": memory_bytes} if memory_bytes else {})}
    drain_s = _drain_s(path, given)
    deployment = serve.deployment(
        name="pool",
        num_replicas=replicas,
        ray_actor_options=resources,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=drain_s + _MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
    )(PoolReplica)
    return deployment.bind(path, given)


def _drain_s(path: str, settings: Mapping[str, Any]) -> float:
    from cloud_pool.config import PoolConfig
    from tidegate.config import load

    return float(load(PoolConfig, Path(path) if path else None, **settings).drain_s)
