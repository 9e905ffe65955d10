"""Ray Serve's hook for routing: requests go to replicas that have served similar texts."""

from collections.abc import Iterable

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..routing import ROUTERS, Affinity, ReplicaLoad
from .messages import ForwardedRequest, route_of


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
