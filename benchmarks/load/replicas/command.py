"""`python -m benchmarks replicas`: real text on several simulated engines, by router and by what replicas share."""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from hf_smartspec.candidates import SuffixTreeCandidates
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.recordings import Fields, Recording, read_requests, tokenize
from hf_smartspec.goodput import CostModel, DraftCost, GoodputAuction
from hf_smartspec.replicas.routing import Affinity, LeastLoaded, PowerOfTwo, RoundRobin, Router
from hf_smartspec.simulator import LoadRequest, SimulatedEngine, poisson

from ...kit.models import choose_model, files_of, tokenizer_of
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Column
from ..devices import Device, datasheet_cost
from .fleet import SimulatedFleet

_DRAFT_COST = DraftCost(per_call=2e-5, per_row=1e-5)
_MAX_PROMPT, _MAX_BATCH_SIZE, _SYSTEM_FROM = 1024, 32, 2**30
_CAPTION = "reused: of the prompts' tokens; latency: mean; busiest: requests of the busiest replica by the mean"
_COLUMNS = (
    Column("tokens/step", "mean_accepted_length", "{:.2f}"),
    Column("reused", "reused_share", "{:.0f} %", 100),
    Column("latency", "mean_latency", "{:.2f} s"),
    Column("p99", "p99_latency", "{:.2f} s"),
    Column("busiest", "imbalance", "{:.2f}"),
)


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
    choose_model(args)
    session = new_session(args, free=["replicas"], is_simulated=True)
    texts = _texts(args)
    about = "Simulated: replicas of a 7 B model, each on an A100 by its data sheet; "
    about += f"real text, {args.tenants} tenants, {args.rate:g} requests per second and replica."
    console = print_head(session, "replicas", about)
    return session.run([_section(texts, num, args) for num in args.replicas], console)


def _section(texts: Sequence[Sequence[Recording]], num: int, args: argparse.Namespace) -> Section:
    """Return all ways to spread requests over so many replicas."""
    cost = datasheet_cost(Device.a100(), 6.7e9, 32, 4096)

    def cases() -> Iterator[Case]:
        requests = _requests(texts, num, args)
        for way in WAYS:
            yield Case(way.name, partial(_serve, way, num, requests, cost, args))

    return Section(f"{num} replicas", cases, _COLUMNS, note=_CAPTION)


def _texts(args: argparse.Namespace) -> list[list[Recording]]:
    """Return the recordings by file."""
    tokenizer, files = tokenizer_of(args), files_of(args)
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
    """Return requests of tenants in a random order, each with texts of its own."""
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
    """An exchange between suffix trees of the outputs that each has kept since the last one."""

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
