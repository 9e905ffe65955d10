"""Comparison of speculation with plain decoding, for one way of drafting: tokens, scores and logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from ...decoding.statistics import GenerationStatistics
from ...sampling.noise import SeededGumbelLogitsProcessor, add_gumbel_noise
from ..common.exactness import Difference, Rounding, find_differences, without_padding
from ..common.runs import Decoding, Run, decode_plainly, decode_speculatively, eos_ids, tokens_by_default, up_to_end
from .drafts import Drafting


@dataclass
class TokenCheck:
    """Comparison of tokens, for one way of drafting at one batch size."""

    decoding: str
    drafts: str
    batch_size: int
    num_rows: int = 0
    num_tokens: int = 0  # of all rows together, up to the first difference in each
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class ScoreCheck:
    """
    Comparison of returned `logits` and `scores`: the largest absolute differences of finite values. `largest` is the
    largest finite value; `num_edge` counts values that only one side has filtered away.
    """

    decoding: str
    drafts: str
    num_positions: int
    logits: float
    scores: float
    largest: float
    num_edge: int
    tolerance: float

    @property
    def is_close(self) -> bool:
        """Return whether rounding explains the differences of the values."""
        return max(self.logits, self.scores) <= self.tolerance

    @property
    def is_filtered_alike(self) -> bool:
        """Return whether only a few tokens, at the very edge of top-k or top-p, were kept by one side alone."""
        return self.num_edge <= max(self.num_positions // 20, 1)


@dataclass(frozen=True)
class Comparison:
    """Comparison of one way of drafting with plain decoding, for batches of padded prompts (`inputs` of `generate`)."""

    model: PreTrainedModel
    decoding: Decoding
    max_new_tokens: int
    drafting: Drafting
    rounding: Rounding

    def check_batch(
        self, inputs: dict[str, torch.Tensor], plain: torch.Tensor, check: TokenCheck, checks_default_output: bool
    ) -> None:
        """
        Compare speculation's tokens with plain decoding's (`[rows, new]`), and add the result to `check`. With
        `checks_default_output`, also compare a call that returns tokens only, in which rows are freed when they end.
        """
        call = (self.model, inputs, self.decoding, self.max_new_tokens)
        continuations = plain.tolist()
        run = decode_speculatively(*call, self.drafting.assistant(continuations))
        found = self._differences(plain, run.tokens)
        if checks_default_output and not found:
            found = self._differences(plain, tokens_by_default(*call, self.drafting.assistant(continuations)))
        if found:
            found = self._with_gaps(found, inputs, continuations)
        ended_at, ends = {item.row: item.position for item in found}, set(eos_ids(self.model))
        lengths = [len(up_to_end(row, ends)) for row in continuations]
        check.num_tokens += sum(ended_at.get(row, length) for row, length in enumerate(lengths))
        check.differences += [replace(item, row=item.row + check.num_rows) for item in found]
        check.num_rows += len(plain)
        check.statistics += run.statistics

    def _differences(self, plain: torch.Tensor, own: torch.Tensor) -> list[Difference]:
        ends = eos_ids(self.model)
        return find_differences(without_padding(plain, ends), without_padding(own, ends))

    def _with_gaps(
        self, differences: Sequence[Difference], inputs: dict[str, torch.Tensor], continuations: list[list[int]]
    ) -> list[Difference]:
        """Decode the batch again both ways, with scores, and add the gaps of each side."""
        call = (self.model, inputs, self.decoding, self.max_new_tokens)
        plain = decode_plainly(*call, records=True)
        own = decode_speculatively(*call, self.drafting.assistant(continuations), records=True)
        if own.logits is None or own.scores is None:
            return list(differences)
        return [self._with_gap(item, inputs, plain, own) for item in differences]

    def _with_gap(self, item: Difference, inputs: dict[str, torch.Tensor], plain: Run, own: Run) -> Difference:
        row, at = item.row, item.position
        if min(item.plain_token, item.own_token) < 0 or at >= plain.tokens.shape[1]:
            return item
        assert plain.logits is not None and plain.scores is not None, "recorded"
        assert own.logits is not None and own.scores is not None, "recorded"
        text, plain_logits = plain.tokens[row, :at], plain.logits[row, at]
        tolerance, scale = self.rounding.tolerance(_largest(plain_logits)), 1.0
        if own.tokens[row, : at + 1].tolist() == [*text.tolist(), item.own_token]:
            own_scores, own_logits = own.scores[row, at], own.logits[row, at]
        else:  # the second call had other drafts, rounded differently, and picked other tokens
            alone = {name: value[row : row + 1] for name, value in inputs.items()}
            own_scores, own_logits = self._scores_after(alone, text)
            if own_scores[item.own_token] == -torch.inf and self._may_keep(own_logits, item.own_token, tolerance):
                own_scores[item.own_token] = own_logits[item.own_token] / self.decoding.temperature
        scores = torch.stack([plain.scores[row, at], own_scores])
        if self.decoding.seed is not None:
            scale = 1 / self.decoding.temperature
            seed = SeededGumbelLogitsProcessor(self.decoding.seed).seed_of(row)
            scores = add_gumbel_noise(scores, [seed] * 2, [at] * 2)
        return replace(
            item,
            plain_gap=float(scores[0, item.plain_token] - scores[0, item.own_token]),
            own_gap=float(scores[1, item.own_token] - scores[1, item.plain_token]),
            logit_error=_largest_error(plain_logits, own_logits),
            tolerance=scale * tolerance,
        )

    def _scores_after(self, inputs: dict[str, torch.Tensor], text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and logits `[vocab_size]` of this library's forward after one row's prompt and a text `[n]`."""
        text = text.to(self.model.device)[None]
        if self.model.config.is_encoder_decoder:
            start = self.model.generation_config.decoder_start_token_id
            more = {"decoder_input_ids": torch.cat([torch.full_like(inputs["input_ids"][:, :1], start), text], dim=1)}
        else:
            new = {"input_ids": text, "attention_mask": torch.ones_like(text)}
            more = {name: torch.cat([inputs[name], value], dim=1) for name, value in new.items()}
        run = decode_speculatively(self.model, inputs | more, self.decoding, 1, "none", records=True)
        assert run.scores is not None and run.logits is not None, "recorded"
        return run.scores[0, 0], run.logits[0, 0]

    def _may_keep(self, logits: torch.Tensor, token: int, tolerance: float) -> bool:
        """Return whether filters may keep a token if each logit of `[vocab_size]` is wrong by up to the tolerance."""
        favoured = torch.where(logits > logits[token], logits - tolerance, logits)[None]
        favoured[0, token] += tolerance
        for item in self.decoding.filters():
            favoured = item(None, favoured)
        return bool(favoured[0, token] > -torch.inf)

    def check_scores(self, inputs: dict[str, torch.Tensor]) -> ScoreCheck | None:
        """Compare returned `logits` and `scores`, up to each row's first different token; None if there are none."""
        call = (self.model, inputs, self.decoding, self.max_new_tokens)
        plain = decode_plainly(*call, records=True)
        own = decode_speculatively(*call, self.drafting.assistant(plain.tokens.tolist()), records=True)
        if own.logits is None or own.scores is None:
            return None
        end = {item.row: item.position + 1 for item in self._differences(plain.tokens, own.tokens)}
        width = min(plain.tokens.shape[1], own.tokens.shape[1])
        stops = [min(end.get(row, width), width) for row in range(len(plain.tokens))]
        logits, scores = (
            tuple(_cut(getattr(run, name), stops) for run in (plain, own)) for name in ("logits", "scores")
        )
        largest = max(_largest(logits[0]), _largest(scores[0]))
        return ScoreCheck(
            self.decoding.name,
            self.drafting.name,
            num_positions=sum(stops),
            logits=_largest_error(*logits),
            scores=_largest_error(*scores),
            largest=largest,
            num_edge=int((torch.isfinite(scores[0]) != torch.isfinite(scores[1])).sum()),
            tolerance=self.rounding.tolerance(largest),
        )


def _cut(values: torch.Tensor, stops: Sequence[int]) -> torch.Tensor:
    return torch.cat([row[:stop] for row, stop in zip(values, stops)])


def _largest(values: torch.Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if len(finite) else 0.0


def _largest_error(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest absolute difference where both are finite; inf if one side has a NaN."""
    if first.isnan().any() or second.isnan().any():
        return math.inf
    return _largest((first - second)[torch.isfinite(first) & torch.isfinite(second)])
