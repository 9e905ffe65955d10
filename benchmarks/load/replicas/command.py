"""`python -m benchmarks replicas`: real text on several simulated engines, by who serves what and what they share."""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hf_smartspec.candidates import SuffixTreeCandidates
from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.outputs import check_output, write_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.recordings import Fields, Recording, read_requests, tokenize, tokenizer_of
from hf_smartspec.goodput import CostModel, DraftCost, GoodputAuction
from hf_smartspec.replicas.routing import Affinity, LeastLoaded, PowerOfTwo, RoundRobin, Router
from hf_smartspec.simulator import Device, LoadRequest, SimulatedEngine, SimulatedFleet, datasheet_cost, poisson

_DRAFT_COST = DraftCost(per_call=2e-5, per_row=1e-5)
_MAX_PROMPT, _MAX_BATCH_SIZE, _SYSTEM_FROM = 1024, 32, 2**30
_COLUMNS = ("tokens/step", "reused", "latency", "p99", "busiest")
_CAPTION = "reused: of the prompts' tokens; latency: mean; busiest: requests of the busiest replica by the mean"


class Way(NamedTuple):
    """How requests are spread, and whether outputs are shared."""

    name: str
    new_router: Callable[[int], Router]
    shares: bool = False


WAYS = (
    Way("round robin", lambda seed: RoundRobin()),
    Way("least loaded", lambda seed: LeastLoaded()),
    Way("power of two", PowerOfTwo),
    Way("affinity", lambda seed: Affinity()),
    Way("power of two, shared trees", PowerOfTwo, shares=True),
    Way("affinity, shared trees", lambda seed: Affinity(), shares=True),
)


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    texts = _texts(args)
    cost = datasheet_cost(Device.a100(), 6.7e9, 32, 4096)
    console = make_console()
    console.print(
        "[bold]benchmarks replicas[/bold] Simulated: replicas of a 7 B model, each on an A100 by its data sheet; "
        f"real text, {args.tenants} tenants, {args.rate:g} requests per second and replica.\n",
        highlight=False,
    )
    found: dict[str, dict[str, Any]] = {}
    try:
        with track(total=len(args.replicas) * len(WAYS), desc="simulating", unit=" runs") as progress:
            for num in args.replicas:
                requests = _requests(texts, num, args)
                found[str(num)] = {}
                for way in WAYS:
                    found[str(num)][way.name] = _serve(way, num, requests, cost, args)
                    progress.update()
    finally:  # interrupted, what was simulated so far is still worth having
        for name, rows in found.items():
            lines = table(f"{name} replicas", "", *_COLUMNS)
            for way_name, row in rows.items():
                lines.add_row(way_name, *_shown(row))
            console.print(lines)
        console.print(_CAPTION, highlight=False)
        if args.json:
            write_json(args.json, {"command": command_of(args), "is_simulated": True, "replicas": found})
    return 0


def _texts(args: argparse.Namespace) -> list[list[Recording]]:
    """By file."""
    files = args.files or [demo_folder("FILE", *([] if args.tokenizer else ["--tokenizer"])) / "prompts.jsonl"]
    tokenizer = tokenizer_of(args.tokenizer)
    limit = max(args.requests * max(args.replicas), args.tenants)  # more are never asked
    found = [tokenize(read_requests(path, Fields(), limit), tokenizer, _MAX_PROMPT) for path in files]
    found = [[item for item in items if len(item.response)] for items in found]
    for path, items in zip(files, found):
        if not items:
            raise UsageError(f"no responses in {str(path)!r}")
        if len(items) < (num := -(-args.tenants // len(files))):
            raise UsageError(f"--tenants: {num} of them are to ask what is in {str(path)!r}, which has {len(items)}")
    return found


def _requests(texts: Sequence[Sequence[Recording]], num_replicas: int, args: argparse.Namespace) -> list[LoadRequest]:
    """Tenants in a random order, each going through texts of its own."""
    rng = np.random.default_rng([args.seed, num_replicas])
    times = poisson(args.rate * num_replicas, args.requests * num_replicas, rng)
    systems = rng.integers(_SYSTEM_FROM, 2**31 - 1, (args.tenants, args.system))
    stride = -(-args.tenants // len(texts))
    own = [texts[tenant % len(texts)][tenant // len(texts) :: stride] for tenant in range(args.tenants)]
    order = [rng.permutation(len(items)) for items in own]
    asked = [0] * args.tenants
    found = []
    for time, tenant in zip(times, rng.integers(0, args.tenants, len(times))):
        item = own[tenant][order[tenant][asked[tenant] % len(own[tenant])]]
        asked[tenant] += 1
        prompt = np.concatenate([systems[tenant], item.prompt])
        response = item.response[: args.max_new_tokens]
        found.append(LoadRequest(float(time), prompt, len(response), response, namespace=f"tenant {tenant}"))
    return found


def _serve(
    way: Way, num: int, requests: Sequence[LoadRequest], cost: CostModel, args: argparse.Namespace
) -> dict[str, float]:
    sources = [SuffixTreeCandidates(max_bytes=2**26) for _ in range(num)]
    engines = [SimulatedEngine(cost, source, _DRAFT_COST, max_batch_size=_MAX_BATCH_SIZE) for source in sources]
    exchange = Exchange(sources) if way.shares else None
    fleet = SimulatedFleet(engines, way.new_router(args.seed), exchange, args.interval)
    # Requests are the names under which drafters know them: every way has its own.
    result = fleet.run([replace(item) for item in requests], lambda _: GoodputAuction(copy.deepcopy(cost)))
    return result.as_dict()


class Exchange:
    """Has suffix trees tell one another what they kept since the last time."""

    def __init__(self, sources: Sequence[SuffixTreeCandidates]):
        self.sources = sources
        self._seen = [0] * len(sources)

    def __call__(self) -> None:
        new = [source.outputs(seen, only_served=True) for source, seen in zip(self.sources, self._seen)]
        self._seen = [items[-1][0] if items else seen for items, seen in zip(new, self._seen)]
        for place, source in enumerate(self.sources):
            for other, items in enumerate(new):
                for _, namespace, tokens in items if other != place else ():
                    source.add_outputs([tokens], namespace, progress=False)


def _shown(row: dict[str, float]) -> list[str]:
    return [
        f"{row['mean_accepted_length']:.2f}",
        f"{100 * row['reused_share']:.0f} %",
        f"{row['mean_latency']:.2f} s",
        f"{row['p99_latency']:.2f} s",
        f"{row['imbalance']:.2f}",
    ]
