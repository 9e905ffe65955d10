"""Reproduction: tokens of each prompt alone, without drafts, against those with drafts, in batches and in an engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ...decoding.statistics import GenerationStatistics
from ...generate import enabled
from ...serving.engine import Engine
from ..common.models import left_padded
from ..common.runs import Decoding, eos_ids, tokens_by_default, up_to_end
from .drafts import Drafting

_AT_ONCE, _PIECE = 8, 48  # requests in an engine, and tokens of their prompts in a step


@dataclass(frozen=True)
class Reproduction:
    """Comparison of one way of decoding with each prompt alone, without drafts."""

    decoding: str
    drafts: str
    batch_size: int  # 0: in an engine
    num_rows: int
    num_tokens: int
    num_differing: int  # rows
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)


class Reproducer:
    """
    Decodes all prompts alone and without drafts, and then in other ways. Each prompt has a seed of its own, so that it
    should sample the same tokens everywhere.

    Args:
        ways (sequence of `Drafting`): Ways of drafting, besides none.
        batch_sizes (sequence of `int`): Batch sizes of `generate`. An engine follows, which decodes several prompts at
            once and runs them in pieces.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[list[int]],
        ways: Sequence[Drafting],
        batch_sizes: Sequence[int],
        max_new_tokens: int,
    ):
        self.model, self.prompts, self.max_new_tokens = model, prompts, max_new_tokens
        self._counts = GenerationStatistics()  # of the way that is compared
        none = Drafting("none", lambda _: "none")
        self.ways = [(size, way) for size in batch_sizes for way in (none, *ways) if (size, way) != (1, none)]
        self.ways += [(0, way) for way in (none, *ways)]

    def compare(self, decoding: Decoding) -> Iterator[Reproduction]:
        """Yield the comparison of each of `ways`."""
        alone = [tokens for start in range(len(self.prompts)) for tokens in self._generate(decoding, start, 1, "none")]
        for size, way in self.ways:
            self._counts = GenerationStatistics()
            if size:
                starts = range(0, len(alone), size)
                batches = [
                    self._generate(decoding, start, size, way.assistant(alone[start : start + size]))
                    for start in starts
                ]
                rows = [tokens for batch in batches for tokens in batch]
            else:
                rows = self._serve(decoding, way.assistant(alone))
            num_differing = sum(own != expected for own, expected in zip(rows, alone, strict=True))
            num_tokens = sum(map(len, rows))
            yield Reproduction(decoding.name, way.name, size, len(rows), num_tokens, num_differing, self._counts)

    def _generate(self, decoding: Decoding, start: int, size: int, assistant: Any) -> list[list[int]]:
        """Return the new tokens of neighbouring prompts, decoded in one batch."""
        prompts = self.prompts[start : start + size]
        inputs = left_padded(prompts, self.model.generation_config.pad_token_id, self.model.device)
        call = self.model, inputs, decoding, self.max_new_tokens, assistant
        seeds = None if decoding.seed is None else [decoding.seed + start + row for row in range(len(prompts))]
        with enabled(self.model):
            rows = tokens_by_default(*call, seeds).tolist()
            known: Any = vars(self.model).get("smartspec_statistics")  # not where models cannot speculate
            self._counts += known.last if known is not None else GenerationStatistics()
        return [self._up_to_end(row) for row in rows]

    def _serve(self, decoding: Decoding, assistant: Any) -> list[list[int]]:
        """Return the new tokens of all prompts, as an engine decodes them."""
        arguments = decoding.own_arguments() | {"max_new_tokens": self.max_new_tokens}
        with Engine(self.model, assistant, max_batch_size=_AT_ONCE, max_prefill_tokens=_PIECE) as engine:
            names = []
            for number, prompt in enumerate(self.prompts):
                seed = {} if decoding.seed is None else {"seed": decoding.seed + number}
                names.append(engine.add_request(prompt, **arguments | seed))
            outputs: list[Any] = [engine.get_result(name) for name in names]
        self._counts = sum([output.statistics for output in outputs], self._counts)
        return [self._up_to_end(output.generated_tokens) for output in outputs]

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        return up_to_end(tokens, set(eos_ids(self.model)))
