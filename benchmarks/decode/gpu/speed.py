"""Tokens per second of a cost-matched target: drafts of fixed acceptance, drafts for real text, and the peers."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from hf_smartspec.candidates import TreeCandidateGenerator
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.prepare.config import SmartSpecConfig

from ...kit.session import Case, Section
from ...kit.sources import sources_by_name
from ...kit.tables import Column, Row, Rows
from .arguments import ACCEPTANCE, COMPILED, TEXT
from .bandwidth import PEAK
from .serving import Way, assisted, continuous, engine, generate, measure
from .shapes import Workload, World

RATES = (0.7, 0.6, 0.8)
PLAIN, CONTINUOUS = "generate", "generate_batch"
_SOURCES = ("draft", "prompt_lookup", "suffix", "auto")
_COMPILED_SIZES = (1, 8)  # of batches: each is compiled by itself


def acceptance(world: World, shape: str, share: float) -> Section:
    """Return measurements of known texts, drafted at known rates of acceptance."""
    first, *others = [{rate_name(rate): engine(partial(_known, rate))} for rate in RATES]
    plain = {PLAIN: generate(), "none": engine(partial(_drafted, world, "none"))}
    parts = [plain | first, {CONTINUOUS: continuous()}, *others]  # what matters most comes first, for all batch sizes

    def cases() -> Iterator[Case]:
        for ways in parts:
            for batch_size in world.plan.batch_sizes:
                for name, way in ways.items():
                    yield _case(world, shape, f"batch {batch_size}, {name}", world.random_text, batch_size, way)

    return Section(f"{ACCEPTANCE} {shape}", cases, _COLUMNS, share=share)


def text(world: World, shape: str, share: float) -> Section:
    """
    Return measurements of the target's own text, drafted by its draft model too, and of recorded answers, drafted from
    text.
    """

    own, recorded = ("own", world.own_text), ("people's", world.recorded_text)
    ways = {PLAIN: generate()} | {name: engine(partial(_drafted, world, name)) for name in _sources(world)}
    first, *larger = world.plan.batch_sizes
    parts = [(own, first, ways), (recorded, first, ways), (own, first, _assisted(world))]
    parts += [(own, batch_size, ways) for batch_size in larger] + [(recorded, first, _assisted(world))]

    def cases() -> Iterator[Case]:
        for (kind, texts), batch_size, chosen in parts:
            for name, way in chosen.items():
                yield _case(world, shape, f"{kind}, batch {batch_size}, {name}", texts, batch_size, way)

    return Section(f"{TEXT} {shape}", cases, _COLUMNS, share=share)


def compiled(world: World, shape: str, share: float) -> Section:
    """Return measurements of transformers' compiled forms, which may take very long to compile."""
    level = int(world.device.type == "cuda")  # elsewhere, `generate` does not compile either
    ways = {
        PLAIN: generate(),
        f"{PLAIN} compiled": generate(is_compiled=True, cache_implementation="static"),
        f"{CONTINUOUS} compiled": continuous(default_compile_level=level),
    }

    def cases() -> Iterator[Case]:
        for batch_size in _COMPILED_SIZES:
            for name, way in ways.items():
                yield _case(world, shape, f"batch {batch_size}, {name}", world.random_text, batch_size, way)

    return Section(f"{COMPILED} {shape}", cases, _COLUMNS, share=share, may_overrun=False)


def rate_name(rate: float) -> str:
    return f"acceptance {rate}"


def _case(
    world: World,
    shape: str,
    name: str,
    texts: Callable[[int], Workload],
    batch_size: int,
    way: Way,
) -> Case:
    num_rows = batch_size
    if batch_size == 1 and texts != world.random_text:
        num_rows = world.plan.requests
    return Case(name, lambda: measure(world, shape, partial(texts, num_rows), batch_size, way))


def _sources(world: World) -> list[str]:
    return [name for name in _SOURCES if name != "draft" or name in world.names]


def _assisted(world: World) -> dict[str, Way]:
    """Return transformers' own drafts, which are for single texts."""
    ways = {"assistant_model": assisted(lambda: {"assistant_model": world.draft()})} if "draft" in world.names else {}
    return ways | {"transformers' lookup": assisted(lambda: {"prompt_lookup_num_tokens": 10})}


def _known(rate: float, model: PreTrainedModel, work: Workload) -> SmartSpecConfig:
    texts = {prompt.tobytes(): response for prompt, response in zip(*work)}
    return SmartSpecConfig(FixedAcceptance(texts, rate, model.config.vocab_size))


def _drafted(world: World, name: str, model: PreTrainedModel, work: Workload) -> SmartSpecConfig:
    draft = world.draft() if name == "draft" else None
    return sources_by_name([name], world.setup(model, draft))[name]()


def ratio(rows: Rows, name: str) -> float | None:
    """
    Return tokens per second by those of the same section's plain `generate` at the same batch size; None if unknown.
    """
    plain = rows.get(f"{name.rpartition(', ')[0]}, {PLAIN}")
    return rows[name]["tokens_per_second"] / plain["tokens_per_second"] if plain and name in rows else None


def _to_plain(row: Row, rows: Rows) -> float | None:
    return ratio(rows, next(name for name, other in rows.items() if other is row))


_COLUMNS = (
    Column("tokens / s", "tokens_per_second", "{:.1f}"),
    Column("x plain", _to_plain, "{:.2f}"),
    Column("step ms", "seconds_per_step", "{:.2f}", 1e3),
    Column("per step", "tokens_per_row_and_step", "{:.2f}"),
    Column("accepted", "acceptance_rate", "{:.2f}"),
    PEAK,
)


class FixedAcceptance(TreeCandidateGenerator):
    """
    Chains each of whose tokens is right with the same probability, if those before it are; this is also the probability
    that they claim. Drafting costs nothing: the target is what is measured.

    Args:
        texts (dict): The text after each prompt, int64 `[n]`, by the prompt's bytes.
        rate (`float`): Probability of a right token.
        vocab_size (`int`): Wrong tokens are others below it.
        seed (`int`): Seed of the errors.
    """

    default_num_nodes = 16

    def __init__(self, texts: dict[bytes, np.ndarray], rate: float, vocab_size: int, seed: int = 0):
        self.texts, self.rate, self.vocab_size = texts, rate, vocab_size
        self._rng = np.random.default_rng(seed)
        self._rest: dict[Hashable, np.ndarray] = {}

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._rest[request_id] = self.texts[prompt.tobytes()]

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._chain(self._rest[name][:limit]) for name, limit in zip(request_ids, max_nodes)]

    def _chain(self, truth: np.ndarray) -> DraftTree:
        is_wrong = self._rng.random(len(truth)) >= self.rate
        return DraftTree.chain((truth + is_wrong) % self.vocab_size, [self.rate] * len(truth))

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._rest[request_id] = self._rest[request_id][len(tokens) :]

    def stop(self, request_id: Hashable) -> None:
        self._rest.pop(request_id, None)
