"""How many replicas a service needs, by Ray Serve's own means."""

from typing import Any

from ray.serve.config import AutoscalingContext


class ScaleByGoodput:
    """
    Enough replicas that each has no more than the target number of requests, running and waiting, and that each running
    request gets `min_goodput` tokens per second. Delays and limits are Ray Serve's.

    Args:
        min_goodput (`float`): Tokens per second and request; 0 looks at the queue alone.
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
            by_goodput = min(by_goodput, context.total_num_requests)  # one alone cannot be helped by more replicas
        return max(by_queue, by_goodput), {}
