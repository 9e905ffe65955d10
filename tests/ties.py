"""Why two results differ: a tie between two scores that float32 cannot tell apart, or a fault."""

import copy
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .cases import Setting
from .models import DEVICE, in_float64

# Two plain forwards of different batch shape differ by up to about 3e-6 of the logits' spread in float32. A gap of more
# than this share of the spread is no matter of rounding.
TIE = 1e-5
PERTURBATION = 1e-6  # relative, of weights; float32 rounds to 6e-8
NUM_PERTURBATIONS = 50


@dataclass(frozen=True)
class Difference:
    """The first token at which a row differs from plain decoding."""

    case: str
    row: int
    position: int  # among the generated tokens
    expected: int
    actual: int
    gap: float  # of the two tokens' scores in float64, as a share of the logits' spread; infinite if one is ruled out
    tie: str | None  # what kind of tie it is; None for a fault

    def __str__(self) -> str:
        verdict = f"tie ({self.tie})" if self.tie else "FAULT"
        return (
            f"{verdict} in {self.case}, row {self.row}: generated token {self.position} is {self.actual} instead of "
            f"{self.expected}; their scores in float64 differ by {self.gap:.1e} of the logits' spread"
        )


def first_difference(case: str, setting: Setting, row: int, expected: list[int], actual: list[int]) -> Difference:
    """Explains two unequal rows, given as generated tokens."""
    pairs = zip(expected, actual)
    position = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
    tokens = [ids[position] if position < len(ids) else -1 for ids in (expected, actual)]
    if -1 in tokens:
        return Difference(case, row, position, *tokens, float("inf"), None)
    gap, tie = _explain(setting, row, expected[:position], *tokens)
    return Difference(case, row, position, *tokens, gap, tie)


def _explain(setting: Setting, row: int, generated: list[int], expected: int, actual: int) -> tuple[float, str | None]:
    """Scores both candidates by a plain forward of the row's own text, without padding, in float64."""
    text = torch.tensor([[*setting.prompts[row], *generated]], device=DEVICE)
    # The processors count from the padded prompt, as in the batch.
    width = setting.inputs["input_ids"].shape[1]
    padded = torch.cat([setting.inputs["input_ids"][row], torch.tensor(generated, dtype=torch.long, device=DEVICE)])
    processors = _row_processors(setting, row, width)

    @torch.no_grad()
    def logits_and_scores(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=text).logits[0, -1].double()
        return logits, processors(padded[None], logits[None].clone())[0]

    exact = in_float64(copy.deepcopy(setting.model))
    logits, scores = logits_and_scores(exact)
    spread = float(logits.std())
    gap = abs(float(scores[expected] - scores[actual])) / spread
    if gap < TIE and float(scores.max() - scores[actual]) < TIE * spread:
        return gap, "scores"
    # Also a tie: a token on the edge of a filter (top-k, top-p, ...), or two experts of equal score. Then weights that
    # are rounded a little differently pick now one token, now the other.
    weights = {name: value.clone() for name, value in exact.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    winners = {int(scores.argmax())}
    for _ in range(NUM_PERTURBATIONS):
        for name, value in exact.state_dict().items():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(DEVICE)
                value.copy_(weights[name] * (1 + PERTURBATION * noise))
        winners.add(int(logits_and_scores(exact)[1].argmax()))
        if winners >= {expected, actual}:
            return gap, "filter or routing"
    return gap, None


def _row_processors(setting: Setting, row: int, width: int) -> LogitsProcessorList:
    """What plain `generate` applies, for one row of the batch."""
    eos = None if setting.eos is None else list(setting.eos)
    config = GenerationConfig(**setting.extras, **setting.limit, eos_token_id=eos, pad_token_id=0)
    model = setting.model
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True)
    processors = model._get_logits_processor(config, input_ids_seq_length=width, logits_processor=LogitsProcessorList())
    if setting.sampling is not None:
        *warpers, noise = setting.warpers()
        processors += [*warpers, noise.for_row(row, width)]
    return processors
