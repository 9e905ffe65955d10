"""The papers' figures about load, as loads of the simulated engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from hf_smartspec.candidates import Datastore, PromptLookupCandidates, SSSDCandidates, TreeCandidateGenerator
from hf_smartspec.commands.common.baselines import PIACandidates
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.load.policies import Policies
from hf_smartspec.goodput.papers.length import expected_length
from hf_smartspec.goodput.papers.policies import BatchLookupTable
from hf_smartspec.simulator import (
    LoadRequest,
    LoadResult,
    SimulatedEngine,
    TableCandidates,
    gamma,
    poisson,
    tree_size,
)

from ..requests import with_acceptance
from .world import ALPHA, CLOSE, HEADS, LENGTH, Figure, World, llama_3_cost, lookup_table

_RATES = (2.0, 6.0, 14.0)  # requests per second
_VANILLA_RATES = (2.0, 8.0, 14.0, 22.0)
_BATCH_SIZES, _MOST_NODES = (1, 4, 16, 64), 30  # of SSSD, whose system allows no more


def _speedups(
    names: Sequence[str], loads: Mapping[float, Callable[[str], LoadResult]]
) -> dict[str, dict[float, float]]:
    """Return no speculation's mean latency by each policy's. `loads` are functions by x that run a policy by name."""
    series: dict[str, dict[float, float]] = {name: {} for name in names}
    for x, run in loads.items():
        plain = run("none").mean_latency
        for name in names:
            series[name][x] = plain / run(name).mean_latency
    return series


def _worst_ratio(series: Mapping[str, Mapping[float, float]], name: str, others: Sequence[str]) -> float:
    """Return a series' least value by the best of the others at the same x."""
    return min(value / max(series[other][x] for other in others) for x, value in series[name].items())


# SmartSpec


def figure_1(world: World) -> Figure:
    figure = Figure("SmartSpec, Figure 1", f"fixed lengths, alpha {ALPHA}, {LENGTH} tokens in and out",
                    "requests/s", "latency speed-up")  # fmt: skip
    names = ("k=1", "k=3", "k=5")
    series = figure.panels["vanilla speculative decoding"] = _speedups(
        names, {rate: partial(_vanilla, world, rate) for rate in _VANILLA_RATES}
    )
    first, last = _VANILLA_RATES[0], _VANILLA_RATES[-1]
    figure.claim("at the lowest rate, 3 or 5 tokens speed up most", series["k=1"][first] < series["k=3"][first])
    figure.claim(
        "the longer the drafts, the more is lost as the rate rises",
        series["k=5"][last] / series["k=5"][first] < series["k=1"][last] / series["k=1"][first],
    )
    figure.claim("at the highest rate, 5 tokens are slower than none", series["k=5"][last] < 1)
    return figure


def _vanilla(world: World, rate: float, name: str) -> LoadResult:
    """Play the load of Figures 1 and 3 with one length for all steps."""
    times = poisson(rate, world.num_requests, world.rng(3))
    return world.run_draft(with_acceptance(world.same_lengths(times), ALPHA, world.rng(4)), world.policy(name))


def figure_3(world: World) -> Figure:
    figure = Figure("SmartSpec, Figure 3", "the loads of Figure 1", "requests/s", "batch size and steps")
    size = figure.panels["a, tokens in a forward"] = {}
    steps = figure.panels["b, steps of a request"] = {}
    names = ("none", "k=1", "k=3", "k=5")
    for name in names:
        for rate in _VANILLA_RATES:
            result = _vanilla(world, rate, name)
            size.setdefault(name, {})[rate] = result.batched_tokens / result.statistics.forwards
            steps.setdefault(name, {})[rate] = result.statistics.steps / len(result.served)
    last = _VANILLA_RATES[-1]
    are_larger = all(size[one][rate] < size[other][rate] for one, other in pairwise(names) for rate in _VANILLA_RATES)
    are_fewer = all(steps[one][rate] > steps[other][rate] for one, other in pairwise(names) for rate in _VANILLA_RATES)
    growth, saving = size["k=5"][last] / size["none"][last], steps["none"][last] / steps["k=5"][last]
    figure.claim("the more tokens are proposed, the larger is the batch, at every rate", are_larger)
    figure.claim("and the fewer steps a request takes", are_fewer)
    figure.claim(
        f"at the highest rate, 5 tokens enlarge the batch ({growth:.1f} times) more than they save steps "
        f"({saving:.1f} times)",
        growth > saving,
    )
    return figure


def figure_5(world: World) -> Figure:
    figure = Figure("SmartSpec, Figure 5", f"goodput by the model, alpha {ALPHA}, context {2 * LENGTH}",
                    "proposed length", "tokens/s")  # fmt: skip
    lengths, best = np.arange(0, 9), {}
    panel = figure.panels["goodput"] = {}
    for size in (1, 4, 16, 64, 128, 256):
        seconds = world.target.seconds(size * 2 * LENGTH, size * (lengths + 1), lengths + 1)
        draft = lengths * (world.draft.per_call + size * world.draft.per_row)
        goodput = size * expected_length(ALPHA, lengths) / (seconds + draft)
        panel[f"batch {size}"] = dict(zip(lengths.tolist(), goodput.tolist()))
        best[size] = int(lengths[goodput.argmax()])
    falls = sorted(best.values(), reverse=True) == list(best.values()) and best[256] < best[1]
    figure.claim(f"the best length falls with the batch: {best}", falls)
    return figure


def figure_11(world: World) -> Figure:
    figure = Figure("SmartSpec, Figure 11", "draft model, requests of different alpha and length",
                    "requests/s", "latency speed-up")  # fmt: skip
    fixed = ("k=1", "k=3", "k=5")
    for index, (name, (a, b)) in enumerate({"chat, alpha 0.65": (6.5, 3.5), "SQL, alpha 0.85": (8.5, 1.5)}.items()):

        def load(rate: float, a: float = a, b: float = b, index: int = index) -> Callable[[str], LoadResult]:
            times = poisson(rate, world.num_requests, world.rng(5, index))
            requests = world.chat_lengths(times) if index == 0 else world.same_lengths(times)
            alphas = world.rng(6, index).beta(a, b, len(requests))
            requests = with_acceptance(requests, alphas, world.rng(7, index))
            return lambda policy: world.run_draft(requests, world.policy(policy))

        loads = {rate: load(rate) for rate in _RATES}
        figure.panels[name] = _speedups((*fixed, "step", "auction"), loads)
    _claim_never_slower(figure, fixed)
    return figure


def figure_12(world: World) -> Figure:
    figure = Figure("SmartSpec, Figure 12", "prompt lookup on replayed text", "requests/s", "latency speed-up")
    fixed = ("k=1", "k=3", "k=5")
    for index, (name, recordings) in enumerate(world.recordings.items()):

        def load(rate: float, recordings: list[Recording] = recordings, index: int = index):
            times = poisson(rate, world.num_requests, world.rng(8, index))
            chosen = [recordings[place % len(recordings)] for place in range(len(times))]
            requests = [
                LoadRequest(float(time), item.prompt, len(item.response), item.response)
                for time, item in zip(times, chosen)
            ]
            return lambda policy: world.run(requests, world.policy(policy), PromptLookupCandidates(), world.lookup)

        figure.panels[name] = _speedups((*fixed, "step", "auction"), {rate: load(rate) for rate in _RATES})
    _claim_never_slower(figure, fixed)
    return figure


def _claim_never_slower(figure: Figure, fixed: Sequence[str]) -> None:
    for name, series in figure.panels.items():
        worst = min(series["auction"].values())
        figure.claim(f"{name}: the auction is never slower than no speculation (worst {worst:.2f})", worst >= 0.98)
        ratio = _worst_ratio(series, "auction", fixed)
        figure.claim(f"{name}: nor than the best fixed length (worst {ratio:.2f} of it)", ratio >= 1 / CLOSE)


def figure_14(world: World) -> Figure:
    figure = Figure("SmartSpec, Figure 14", "what a perfect predictor would gain, 6 requests/s",
                    "mean alpha", "latency speed-up")  # fmt: skip
    names = ("random", "step", "request", "auction", "oracle")

    def load(alpha: float) -> Callable[[str], LoadResult]:
        times = poisson(6.0, world.num_requests, world.rng(9))
        alphas = world.rng(10).beta(10 * alpha, 10 * (1 - alpha), len(times))
        requests = with_acceptance(world.chat_lengths(times), alphas, world.rng(11))
        return lambda name: world.run_draft(requests, world.policy(name))

    series = figure.panels["draft model"] = _speedups(names, {alpha: load(alpha) for alpha in (0.3, 0.6, 0.9)})
    figure.claim("goodput beats random lengths", _worst_ratio(series, "auction", ["random"]) > 1)
    ratio = _worst_ratio(series, "oracle", names[:-1])
    figure.claim(f"the oracle is the upper bound (at least {ratio:.2f} of any other)", ratio >= 1)
    gap = min(series["auction"][x] / series["oracle"][x] for x in series["oracle"])
    figure.claim(f"which the auction does not reach (at least {gap:.2f} of it)", gap < 1)
    return figure


# Figures 15 and 16 show the same loads.


def figures_15_16(world: World) -> Iterator[Figure]:
    latency = Figure("SmartSpec, Figure 15", f"Medusa, {HEADS} heads, top k each", "requests/s", "mean latency, s")
    tokens = Figure("SmartSpec, Figure 16", "the same loads", "requests/s", "tokens per forward")
    per_row = tokens.panels["per request"] = {}
    for index, alpha in enumerate((0.6, 0.8)):
        panel = latency.panels[f"alpha {alpha}"] = {}
        sizes = tokens.panels[f"alpha {alpha}"] = {}
        for rate in _RATES:
            requests = with_acceptance(
                world.chat_lengths(poisson(rate, world.num_requests, world.rng(12, index))),
                alpha, world.rng(13, index), width=3,
            )  # fmt: skip
            for name in ("top 1", "top 2", "top 3", "tree", "auction"):
                is_fixed = name.startswith("top")
                widths = (int(name[-1]) if is_fixed else 3,) * HEADS
                policy = world.policy(f"k={tree_size(widths)}" if is_fixed else name)
                result = world.run(requests, policy, TableCandidates(widths, is_autoregressive=False), world.heads)
                counts = result.statistics
                panel.setdefault(name, {})[rate] = result.mean_latency
                sizes.setdefault(name, {})[rate] = result.batched_tokens / counts.forwards
                if not is_fixed:
                    drafted = counts.drafted_tokens / counts.steps
                    per_row.setdefault(f"{name}, alpha {alpha}", {})[rate] = 1 + drafted
        for name in ("tree", "auction"):
            ratio = max(value / min(panel[other][rate] for other in panel) for rate, value in panel[name].items())
            latency.claim(f"alpha {alpha}: {name} has the least latency (worst {ratio:.2f} of it)", ratio <= CLOSE)
        last = _RATES[-1]
        latency.claim(
            f"alpha {alpha}: at the highest rate, top 3 is slower than top 1",
            panel["top 3"][last] > panel["top 1"][last],
        )
        for name in ("tree", "auction"):
            of_policy = per_row[f"{name}, alpha {alpha}"]
            tokens.claim(f"alpha {alpha}: {name} verifies less per request as the rate rises",
                         of_policy[last] < of_policy[_RATES[0]])  # fmt: skip
    yield latency
    yield tokens


# Su et al.


def figure_cv(world: World) -> Figure:
    figure = Figure("Su et al., Figure 5", f"regular and bursty arrivals, alpha {ALPHA}",
                    "seconds between requests", "mean latency, s")  # fmt: skip
    table = lookup_table(world)
    for index, variation in enumerate((0.5, 2.0, 5.0)):
        panel = figure.panels[f"CV {variation:g}"] = {}
        for interval in (0.06, 0.12, 0.24):
            times = gamma(1 / interval, variation, world.num_requests, world.rng(14, index))
            requests = with_acceptance(world.same_lengths(times), ALPHA, world.rng(15, index))
            for name in ("none", "k=2", "k=4", "table", "auction"):
                policy = (lambda _: BatchLookupTable(table.lengths)) if name == "table" else world.policy(name)
                panel.setdefault(name, {})[interval] = world.run_draft(requests, policy).mean_latency
        for name in ("table", "auction"):
            ratio = max(
                value / min(panel[other][x] for other in ("none", "k=2", "k=4")) for x, value in panel[name].items()
            )
            figure.claim(
                f"CV {variation:g}: {name} is as good as the better fixed length (worst {ratio:.2f})", ratio <= CLOSE
            )
    return figure


# SSSD


def figure_sssd(world: World) -> Figure:
    """Return Figure 7: all requests at once, for each number that run together."""
    figure = Figure("SSSD, Figure 7", "Llama 3 8 B by data sheet, recorded text, prompts included",
                    "requests that run", "milliseconds")  # fmt: skip
    groups = zip_longest(*world.recordings.values())
    mixed = [item for group in groups for item in group if item is not None]
    earlier, served = np.split(np.arange(len(mixed)), [len(mixed) - min(world.num_requests, len(mixed) // 2)])
    outputs = [mixed[place].response for place in earlier]
    requests = [LoadRequest(0.0, mixed[i].prompt, len(mixed[i].response), mixed[i].response) for i in served]

    def pia() -> PIACandidates:
        source = PIACandidates(_MOST_NODES)
        source.add_outputs(outputs)
        return source

    store, cost = Datastore.from_documents(outputs), llama_3_cost()
    sources: dict[str, Callable[[], TreeCandidateGenerator]] = {
        "none": PromptLookupCandidates, "PIA": pia, "SSSD": partial(SSSDCandidates, store, _MOST_NODES)
    }  # fmt: skip
    latency = figure.panels["latency, per token of a request"] = {}
    spent = figure.panels["cost, of the device per token"] = {}
    for name, new_source in sources.items():
        for size in _BATCH_SIZES:
            engine = SimulatedEngine(cost, new_source(), world.lookup, max_batch_size=size)
            result = engine.run(requests, Policies(cost).new("none" if name == "none" else "roofline"))
            world.tick()
            spent.setdefault(name, {})[size] = 1e3 / result.goodput
            latency.setdefault(name, {})[size] = 1e3 * size / result.goodput
    gains = [spent["none"][size] / spent["SSSD"][size] for size in _BATCH_SIZES]
    among = ", ".join(f"{gain:.2f} at {size}" for gain, size in zip(gains, _BATCH_SIZES))
    figure.claim(f"SSSD costs less than no drafts at every size ({among} times)", min(gains) > 1)
    figure.claim(
        "and less than PIA at every size", all(spent["SSSD"][size] < spent["PIA"][size] for size in _BATCH_SIZES)
    )
    return figure


FIGURES: dict[str, Callable[[World], Any]] = {
    "1": figure_1, "3": figure_3, "5": figure_5, "11": figure_11, "12": figure_12, "14": figure_14, "15": figures_15_16,
    "cv": figure_cv, "sssd": figure_sssd,
}  # fmt: skip
