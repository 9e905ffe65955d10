"""Log-probabilities of a prompt's own tokens, for `echo`: the prompt is decoded as if it were an answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..request.sampling import Settings
from ..served import ServedModel
from ..tokens.processors import TokenLogprobs

# What a model's own generation config may say of answers, as nothing.
_OF_ANSWERS: dict[str, Any] = {
    "eos_token_id": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "guidance_scale": None,
}  # fmt: skip


async def prompt_logprobs(served: ServedModel, ids: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    """
    One entry per token; None for the first, before which there is nothing. All that follow are drafted and come true,
    so that a step reads many, beside the requests of others.
    """
    if len(ids) == 1:
        return [None]
    known = np.array(ids[1:], np.int64)
    arguments = _OF_ANSWERS | {"do_sample": False}
    [answer] = await served.begin([ids[:1]], Settings(arguments, len(known), [None], num_top=num_top, known=known))
    try:
        return [None, *((await answer.whole()).logprobs or ())]
    finally:
        answer.drop()
