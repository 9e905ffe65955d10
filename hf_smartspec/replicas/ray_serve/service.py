"""A service on Ray Serve: replicas and, where Ray Serve's proxy is used, a front."""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ...serving.server.app import Server
from ...serving.server.guard.keys import ApiKeys
from ..routing import ROUTERS, Affinity, ReplicaLoad
from .front import Ingress
from .messages import ForwardedRequest, route_of
from .replica import Replica
from .turns import KeyTurns

_WAITING = 64  # least number of waiting requests that a replica takes; more wait for the first free replica
_HEALTH_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # between two checks whether a replica that is to end is done


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service."""

    replicas: int = 2  # least number of replicas
    max_replicas: int | None = None  # largest number; if more than `replicas`, their number follows the load
    max_batch_size: int = 32  # batch size of each replica's engine
    max_queue: int = 1024  # requests that may wait for a replica, in addition to those that replicas have taken
    # Running and waiting requests of a replica, from which on replicas are added; by default, its `max_batch_size`.
    target_requests: float | None = None
    min_goodput: float = 0.0  # tokens per second and running request, below which replicas are added
    router: str = "affinity"  # a name from `ROUTERS`
    num_cpus: float = 1.0  # CPUs of each replica
    num_gpus: float = 0.0  # GPUs of each replica
    drain_seconds: float = 60.0  # time for a replica's requests to finish before it ends

    @property
    def num_places(self) -> int:
        """Requests that a replica takes at once. Half of them, the most that one key may have, fill its batch."""
        return self.max_batch_size + max(self.max_batch_size, _WAITING)


def make_replicas(load: Callable[[], AbstractContextManager[Server]], options: ServiceOptions) -> serve.Application:
    """
    Return the replicas, for `ray.serve.run` without a route: their handle is for `guarded`.

    Args:
        load (`Callable`): Opens a server, in each replica's process.
        options (`ServiceOptions`): Options of the service.
    """
    replicas = serve.deployment(
        **_how_many(options),
        max_ongoing_requests=options.num_places,
        max_queued_requests=options.max_queue,
        graceful_shutdown_timeout_s=options.drain_seconds,
        graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=SpeculativeRequestRouter,  # type: ignore[arg-type]  # a class or its path
            request_router_kwargs={"router": options.router},
        ),
    )(Replica)
    return replicas.bind(load)


def make_service(
    load: Callable[[], AbstractContextManager[Server]],
    options: ServiceOptions,
    keys: ApiKeys,
    max_body_bytes: int,
    hosts: Collection[str] | None = None,
) -> serve.Application:
    """Return the replicas with a front for Ray Serve's proxy; further arguments as of `guarded`."""
    front = serve.deployment(
        name="Front",
        num_replicas=1,
        max_ongoing_requests=100_000,  # it only forwards: the replicas' queue refuses requests
        graceful_shutdown_timeout_s=options.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )(Ingress)
    return front.bind(make_replicas(load, options), keys, max_body_bytes, hosts, turns_of(options, keys))


def turns_of(options: ServiceOptions, keys: ApiKeys) -> KeyTurns | None:
    """Return the turns that keep one key from taking all replicas; None where there is one key at most."""
    num_places = (options.max_replicas or options.replicas) * options.num_places
    return KeyTurns(num_places, options.max_queue) if len(keys) > 1 else None


def _how_many(options: ServiceOptions) -> dict[str, Any]:
    if options.max_replicas is None or options.max_replicas == options.replicas:
        return {"num_replicas": options.replicas}
    scaling = AutoscalingConfig(
        min_replicas=options.replicas,
        max_replicas=options.max_replicas,
        target_ongoing_requests=options.target_requests or options.max_batch_size,
        policy=AutoscalingPolicy(policy_function=ScaleByGoodput, policy_kwargs={"min_goodput": options.min_goodput}),
    )
    return {"num_replicas": "auto", "autoscaling_config": scaling}


class ScaleByGoodput:
    """
    Policy that asks for enough replicas that each has no more than the target number of requests, running and waiting,
    and that each running request gets `min_goodput` tokens per second. Delays and limits are Ray Serve's.

    Args:
        min_goodput (`float`): Tokens per second and request; 0 considers the queue alone.
    """

    def __init__(self, min_goodput: float = 0.0):
        self.min_goodput = min_goodput

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        assert context.config is not None
        by_queue = context.total_num_requests / context.config.target_ongoing_requests
        measured = list((context.aggregated_metrics or {}).get("goodput", {}).values())
        by_goodput = 0.0
        if measured and self.min_goodput:
            mean = sum(measured) / len(measured)
            by_goodput = context.current_num_replicas * self.min_goodput / max(mean, 1e-9)
            by_goodput = min(by_goodput, context.total_num_requests)  # more replicas than requests would be idle
        return max(by_queue, by_goodput), {}


class SpeculativeRequestRouter(RequestRouter):
    """
    Router by one of the rules of `hf_smartspec.replicas.routing`. Prompts are compared as text; in place of a full
    replica, the one with the fewest requests is chosen.
    """

    def initialize_state(self, router: str = "affinity") -> None:  # type: ignore[override]
        """
        Set the rule.

        Args:
            router (`str`): A name from `ROUTERS`.
        """
        self._rule = ROUTERS[router]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        loads = [self._load(replica) for replica in candidate_replicas]
        others = sorted(range(len(loads)), key=lambda place: loads[place].requests)
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(request, ForwardedRequest):
            return [[candidate_replicas[place]] for place in others]
        route = route_of(request)
        first = self._rule.choose(loads, np.frombuffer(route.text, np.uint8), route.namespace)
        return [[candidate_replicas[place]] for place in (first, *(place for place in others if place != first))]

    def _load(self, replica: RunningReplica) -> ReplicaLoad:
        queue_len = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return ReplicaLoad(replica.replica_id.unique_id, queue_len)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget([replica_id])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = self.curr_replicas.keys() - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        self._forget(gone)

    def _forget(self, gone: Iterable[ReplicaID]) -> None:
        if isinstance(self._rule, Affinity):
            for replica_id in gone:
                self._rule.forget(replica_id.unique_id)
