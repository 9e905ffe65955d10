"""Usage and speculation metrics of a request."""

from collections.abc import Sequence
from typing import Any

from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

from ...outputs import EngineOutput


def usage_of(
    prompt_lens: Sequence[int], outputs: Sequence[EngineOutput], prediction: Sequence[int] | None = None
) -> CompletionUsage:
    """
    Return the usage of a request.

    Args:
        prompt_lens (sequence of `int`): Tokens of each prompt, which count once for all its answers.
        outputs (sequence of `EngineOutput`): Outputs of all answers.
        prediction (sequence of `int`, *optional*): Tokens of the predicted output.
    """
    num_prompt, num_generated = sum(prompt_lens), sum(len(output.generated_tokens) for output in outputs)
    details = CompletionTokensDetails()
    if prediction is not None:
        accepted = [num_predicted(prediction, output.generated_tokens) for output in outputs]
        details.accepted_prediction_tokens = sum(accepted)
        details.rejected_prediction_tokens = len(prediction) * len(outputs) - sum(accepted)
    return CompletionUsage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=_cached(prompt_lens, outputs)),
        completion_tokens_details=details,
    )


def _cached(prompt_lens: Sequence[int], outputs: Sequence[EngineOutput]) -> int:
    """Return the cached tokens of each prompt's first answer, summed."""
    per_prompt = len(outputs) // max(len(prompt_lens), 1)
    return sum(output.num_cached_tokens for output in outputs[:: max(per_prompt, 1)])


def num_predicted(prediction: Sequence[int], tokens: Sequence[int]) -> int:
    """
    Return the length of the longest common subsequence of a prediction and an answer, computed with the bits of long
    integers (Hyyrö, 2004), so that texts of thousands of tokens take milliseconds.
    """
    places: dict[int, int] = {}
    for place, token in enumerate(prediction):
        places[token] = places.get(token, 0) | 1 << place
    everything = (1 << len(prediction)) - 1
    missing = everything
    for token in tokens:
        found = missing & places.get(token, 0)
        missing = ((missing + found) | (missing - found)) & everything
    return len(prediction) - missing.bit_count()


def speculation_of(outputs: Sequence[EngineOutput]) -> dict[str, Any]:
    """Return a request's speculation metrics, under vLLM's names."""
    counts = [output.statistics for output in outputs]
    steps, drafted = sum(item.steps for item in counts), sum(item.drafted_tokens for item in counts)
    accepted = sum(item.accepted_tokens for item in counts)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / max(steps, 1),
            "draft_acceptance_rate": accepted / max(drafted, 1),
            "num_spec_steps": steps,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
        }
    }
