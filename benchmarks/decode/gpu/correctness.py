"""Check in float32 that the tokens are those of plain `generate`, by source and batch size, greedy and sampled."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_smartspec.candidates import DatastoreCandidates
from hf_smartspec.candidates.text.datastore.file import Datastore
from hf_smartspec.commands.common.exactness import Rounding, find_differences
from hf_smartspec.commands.common.models import left_padded
from hf_smartspec.commands.common.runs import Decoding, decode_plainly, eos_ids, up_to_end
from hf_smartspec.commands.verify.comparison import Comparison, TokenCheck
from hf_smartspec.commands.verify.drafts import Drafting, ways_of_drafting
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.serving.engine import Engine

from ...kit.session import Case, Section
from ...kit.sources import sources_by_name
from ...kit.tables import Column, Row
from .arguments import CORRECTNESS
from .shapes import World

_SEED = 5


def section(world: World, share: float) -> Section:
    columns = [Column(name, name) for name in ("rows", "tokens", "drafted", "accepted")]
    columns.append(Column("same tokens", lambda row, _: "yes" if row["is_equal"] else "NO"))
    return Section(CORRECTNESS, lambda: Checks(world).cases(), columns, share=share)


class Checks:
    """Comparisons with plain decoding, each of which runs once."""

    def __init__(self, world: World):
        self.world = world
        self._plain: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def target(self) -> PreTrainedModel:
        return self.world.loaded("target", "float32")

    def cases(self) -> Iterator[Case]:
        ways = self._ways()
        for size in self.world.plan.correct_sizes:
            for decoding in (Decoding(), Decoding(_SEED)):
                for way in ways:
                    name = f"batch {size}, {decoding.name}, {way.name}"
                    yield Case(name, partial(self._compare, size, decoding, way))
        yield Case(f"engine of {max(self.world.plan.correct_sizes)} rows, greedy, auto", self._compare_engine)

    def _ways(self) -> list[Drafting]:
        """Return drafts of fixed sizes, which are the same on every machine, and `auto`, which decides on its own."""
        texts = [[*prompt, *self.world.tokenizer(item.response).input_ids]
                 for prompt, item in zip(self.world.prompts(), self.world.requests())]  # fmt: skip
        vocab_size = self.target.config.vocab_size
        store = DatastoreCandidates(Datastore.from_documents(texts, vocab_size=vocab_size))
        draft = self.world.draft("float32")
        named = sources_by_name(("none", "prompt_lookup:5", "suffix:8", "auto"), self.world.setup(self.target, draft))
        configs = {name: new() for name, new in named.items()} | {"datastore:8": SmartSpecConfig(store, num_nodes=8)}
        drafted = ways_of_drafting("auto", vocab_size)[1:] if draft is None else ways_of_drafting(draft, vocab_size)
        return [*(Drafting.with_config(name, config) for name, config in configs.items()), *drafted]

    def _prompts(self, size: int) -> list[list[int]]:
        """Return the prompts before the last two; a single one is the text that repeats itself."""
        return self.world.prompts()[-size - 2 : -2] if size < len(self.world.prompts()) - 2 else self.world.prompts()

    def _inputs(self, size: int) -> dict[str, torch.Tensor]:
        return left_padded(self._prompts(size), self.target.generation_config.pad_token_id, self.world.device)

    def _plain_tokens(self, size: int, decoding: Decoding) -> torch.Tensor:
        key = (decoding.name, size)
        if key not in self._plain:
            num_tokens = self.world.plan.correct_tokens
            self._plain[key] = decode_plainly(self.target, self._inputs(size), decoding, num_tokens).tokens
        return self._plain[key]

    def _compare(self, size: int, decoding: Decoding, way: Drafting) -> Row:
        check = TokenCheck(decoding.name, way.name, size)
        rounding = Rounding("float32", 0.0)  # as much as is usual explains a tie, which is told, and no excuse
        comparison = Comparison(self.target, decoding, self.world.plan.correct_tokens, way, rounding)
        comparison.check_batch(
            self._inputs(size), self._plain_tokens(size, decoding), check, checks_default_output=True
        )
        differences = [asdict(item) | {"is_tie": item.is_tie} for item in check.differences]
        counts = check.statistics
        return _row(check.num_rows, check.num_tokens, counts.drafted_tokens, counts.accepted_tokens, differences)

    def _compare_engine(self) -> Row:
        size, num_tokens = max(self.world.plan.correct_sizes), self.world.plan.correct_tokens
        plain = self._plain_tokens(size, Decoding())
        engine = Engine(self.target, SmartSpecConfig("auto"), max_batch_size=max(size // 2, 1))
        outputs = engine.generate(self._prompts(size), max_new_tokens=num_tokens, do_sample=False)
        ends, differences = set(eos_ids(self.target)), []
        for index, (expected, output) in enumerate(zip(plain.tolist(), outputs)):
            rows = (up_to_end(tokens, ends) for tokens in (expected, output.generated_tokens))
            plain_row, own_row = (torch.tensor([tokens]) for tokens in rows)
            found = find_differences(plain_row, own_row)
            differences += [asdict(item) | {"row": index} for item in found]
        counts = engine.statistics
        num = sum(len(output.generated_tokens) for output in outputs)
        return _row(size, num, counts.drafted_tokens, counts.accepted_tokens, differences)


def _row(rows: int, tokens: int, drafted: int, accepted: int, differences: Sequence[dict[str, Any]]) -> Row:
    numbers = {"rows": rows, "tokens": tokens, "drafted": drafted, "accepted": accepted}
    return numbers | {"is_equal": not differences, "differences": list(differences)}
