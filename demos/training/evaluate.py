"""How often the draft's first guess is the target's own next token, on answers that the target writes."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .corpus import Example


def render_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The conversation up to the response, as text with an open assistant turn."""
    messages = [{"role": role, "content": content} for role, content in example.messages[:-1]]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def count_matches(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    new_tokens: int,
) -> tuple[int, int]:
    """Let the target answer greedily and compare arg max tokens; returns (matching, compared) positions.

    The end token counts as a position, what follows it does not.
    """
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False).to(target.device)
    inputs.pop("token_type_ids", None)
    prompt_len = inputs.input_ids.shape[1]
    output = target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    answer = output[:, prompt_len:]
    mask = torch.cat([inputs.attention_mask, torch.ones_like(answer)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = draft(input_ids=output, attention_mask=mask, position_ids=positions, use_cache=False).logits
    guesses = logits[:, prompt_len - 1 : -1].argmax(-1)
    ended = (answer == tokenizer.eos_token_id).int().cumsum(-1) - (answer == tokenizer.eos_token_id).int()
    valid = ended == 0
    return int(((guesses == answer) & valid).sum()), int(valid.sum())


def first_token_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heldout: dict[str, list[Example]],
    new_tokens: int = 64,
    max_prompts: int = 64,
    max_prompt_len: int = 512,
    batch_size: int = 16,
) -> dict[str, dict[str, float]]:
    """Acceptance per category and for all prompts together, on one prompt per held-out question.

    Returns:
        `{"math": {"acceptance": 0.61, "positions": 4096, "prompts": 64}, ..., "all": {...}}`
    """
    results, all_matches, all_positions, all_prompts = {}, 0, 0, 0
    for category, examples in sorted(heldout.items()):
        prompts = list({e.group: render_prompt(e, tokenizer) for e in reversed(examples)}.values())[::-1]
        prompts = [p for p in prompts if len(tokenizer(p).input_ids) <= max_prompt_len][:max_prompts]
        matches = positions = 0
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            batch_matches, batch_positions = count_matches(target, draft, tokenizer, batch, new_tokens)
            matches, positions = matches + batch_matches, positions + batch_positions
        if positions:
            results[category] = _row(matches, positions, len(prompts))
        all_matches, all_positions = all_matches + matches, all_positions + positions
        all_prompts += len(prompts)
    results["all"] = _row(all_matches, all_positions, all_prompts)
    return results


def _row(matches: int, positions: int, prompts: int) -> dict[str, float]:
    return {"acceptance": round(matches / max(positions, 1), 4), "positions": positions, "prompts": prompts}
