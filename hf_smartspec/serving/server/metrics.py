"""Metrics for Prometheus, under vLLM's names."""

import time
from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import fmean

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..outputs import EngineOutput
from .engine import ServedEngine

_MODEL = ["model_name"]
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request to its first token.", (*_SHORT, 20.0, 40.0, 80.0, 160.0)),
    "inter_token_latency_seconds": ("Between two steps of a request that yield tokens.", _SHORT),
    "request_time_per_output_token_seconds": ("Of a request, from the first token to the last.", _SHORT),
    "e2e_request_latency_seconds": ("From a request to the end of its answer.", _LONG),
    "request_queue_time_seconds": ("Until a request begins to run.", _LONG),
    "request_prefill_time_seconds": ("From then to its first token.", _LONG),
    "request_decode_time_seconds": ("From then to its end.", _LONG),
    "request_inference_time_seconds": ("From the beginning of its run to the end.", _LONG),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "Generated tokens of finished requests.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens whose keys and values were reused.",
    "num_preemptions": "Times that a request gave way to one of another tenant.",
    "spec_decode_num_drafts": "Steps of requests, each of which verifies a draft.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}


_ENGINE_COUNTERS = ("num_preemptions", *(name for name in _COUNTERS if name.startswith("spec_decode")))


_LEARNING_COUNTERS = {
    "requests": "Requests that drafters have been given to learn from.",
    "tokens": "Tokens of their answers.",
    "updates": "Updates of drafters.",
    "swaps": "Times that a drafter took over new weights.",
    "rollbacks": "Updates whose shadow drafts were worse, so that the weights before them draft on.",
    "meetings": "Updates that began from a mean with another replica's weights.",
    "seconds": "Seconds of training.",
}
_LEARNING_MEANS = {
    "loss": "Loss of the latest update.",
    "acceptance": "Share of shadow drafts that were accepted after the latest update.",
    "acceptance_before": "The same by the weights before it.",
    "interval": "Requests up to an update at present.",
}


class ServerMetrics:
    """Metrics of a server, in a registry of their own, so that a process may have several servers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _MODEL, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", text, _MODEL, registry=self.registry)
            for name, text in _COUNTERS.items()
            if name not in _ENGINE_COUNTERS
        }
        self._ended = Counter(
            "vllm:request_success", "Finished requests.", [*_MODEL, "finished_reason"], registry=self.registry
        )
        self._last_step: dict[str, float] = {}

    def watch(self, engines: Mapping[str, ServedEngine]) -> None:
        """Add the counters and gauges of engines, by model name; they are read at every collection."""
        self.registry.register(_Engines(engines))
        for name in engines:
            for item in [*self._counters.values(), *self._histograms.values()]:
                item.labels(name)
            for reason in ("stop", "length", "abort", "error"):
                self._ended.labels(name, reason)

    def count_step(self, model: str, output: EngineOutput) -> None:
        """Record the time since a running request's last tokens."""
        now = time.perf_counter()
        before = self._last_step.get(output.request_id)
        if before is not None:
            self._histograms["inter_token_latency_seconds"].labels(model).observe(now - before)
        self._last_step[output.request_id] = now

    def count_end(self, model: str, output: EngineOutput) -> None:
        self._last_step.pop(output.request_id, None)
        reason = "abort" if output.finish_reason == "cancelled" else output.finish_reason or "error"
        self._ended.labels(model, reason).inc()
        if reason not in ("stop", "length"):
            return
        num_prompt, num_generated = len(output.prompt_ids), len(output.generated_tokens)
        self._counters["prompt_tokens"].labels(model).inc(num_prompt)
        self._counters["generation_tokens"].labels(model).inc(num_generated)
        self._counters["prefix_cache_queries"].labels(model).inc(num_prompt)
        self._counters["prefix_cache_hits"].labels(model).inc(output.num_cached_tokens)
        for name, seconds in _times(output, num_generated).items():
            self._histograms[name].labels(model).observe(max(seconds, 0.0))

    def count_abort(self, model: str, request_id: str) -> None:
        """Count a request whose client has left."""
        self._last_step.pop(request_id, None)
        self._ended.labels(model, "abort").inc()


def _times(output: EngineOutput, num_generated: int) -> dict[str, float]:
    begin, end = output.lifespan
    first = output.first_token_time or end
    times = {
        "time_to_first_token_seconds": first - output.created_time,
        "e2e_request_latency_seconds": end - output.created_time,
        "request_queue_time_seconds": begin - output.created_time,
        "request_prefill_time_seconds": first - begin,
        "request_decode_time_seconds": end - first,
        "request_inference_time_seconds": end - begin,
    }
    if num_generated > 1:
        times["request_time_per_output_token_seconds"] = (end - first) / (num_generated - 1)
    return times


class _Engines(Collector):
    def __init__(self, engines: Mapping[str, ServedEngine]):
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests that run.", labels=_MODEL)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait for their turn.", labels=_MODEL)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of key/value memory in use.", labels=_MODEL)
        counters = [CounterMetricFamily(f"vllm:{name}", _COUNTERS[name], labels=_MODEL) for name in _ENGINE_COUNTERS]
        for name, engine in self._engines.items():
            load, counts = engine.load, engine.statistics
            running.add_metric([name], load.num_running)
            waiting.add_metric([name], load.num_waiting)
            usage.add_metric([name], load.kv_usage)
            values = engine.num_preemptions, counts.steps, counts.drafted_tokens, counts.accepted_tokens
            for family, value in zip(counters, values):
                family.add_metric([name], value)
        return [running, waiting, usage, *counters, *self._learning()]

    def _learning(self) -> Iterable[Metric]:
        """Yield sums over the drafters that learn from a model's requests, and means of their acceptance."""
        found = {name: counts for name, engine in self._engines.items() if (counts := engine.learning)}
        if not found:
            return
        for field, text in _LEARNING_COUNTERS.items():
            counter = CounterMetricFamily(f"smartspec:learning_{field}", text, labels=_MODEL)
            for name, counts in found.items():
                counter.add_metric([name], sum(getattr(item, field) for item in counts))
            yield counter
        drafters = GaugeMetricFamily("smartspec:learning_drafters", "Drafters that learn.", labels=_MODEL)
        memory = GaugeMetricFamily("smartspec:learning_buffer_bytes", "Memory of samples.", labels=_MODEL)
        for name, counts in found.items():
            drafters.add_metric([name], sum(not item.failure for item in counts))
            memory.add_metric([name], sum(item.buffer_bytes for item in counts))
        yield from (drafters, memory)
        for field, text in _LEARNING_MEANS.items():
            gauge = GaugeMetricFamily(f"smartspec:learning_{field}", text, labels=_MODEL)
            for name, counts in found.items():
                values = [number for item in counts if isfinite(number := getattr(item, field))]
                if values:
                    gauge.add_metric([name], fmean(values))
            yield gauge
