"""Routers, which tell kinds of text apart: a function, a pipeline of transformers, or a classifier that learns."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from transformers import Pipeline, PreTrainedTokenizerBase

from .classifier import TextClassifier
from .features import Text

_MOST_TOKENS = 1024  # of a prompt that is read: half of them its first, half its last


Predictor = Callable[[Sequence[Text]], Sequence[str | None]]  # a drafter's name, any other label, or None for each


def predictor_of(router: Any, tokenizer: PreTrainedTokenizerBase | None) -> Predictor | None:
    """
    Return the function that predicts kinds of texts, for any value that a caller may pass as `router`.

    Raises:
        TypeError: for anything else.
        ValueError: for a pipeline that does not classify texts, or has no texts to classify.
    """
    if router is None:
        return None
    if isinstance(router, TextClassifier):
        return router.predict
    if isinstance(router, Pipeline):
        if router.task not in ("text-classification", "sentiment-analysis"):
            raise ValueError(f"`router` must be a pipeline for 'text-classification', got one for {router.task!r}.")
        if tokenizer is None:
            raise ValueError("A pipeline reads text: pass the target's `tokenizer` as well.")
        return partial(_classified, router)
    if callable(router):
        return lambda texts: [router(text) for text in texts]
    raise TypeError(
        "`router` must be a function of a prompt, a text-classification pipeline of transformers or a TextClassifier, "
        f"got {type(router).__name__}."
    )


def _classified(pipeline: Pipeline, texts: Sequence[Text]) -> list[str]:
    """Return the labels of a pipeline such as "text-classification", for all texts in one batch."""
    results = pipeline(list(texts), truncation=True, top_k=1, batch_size=len(texts))
    return [(result[0] if isinstance(result, list) else result)["label"] for result in results]


def readable(prompt: np.ndarray, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """Return a prompt (int64 `[prompt_len]`) for routers: as text where there is a tokenizer, else as token ids."""
    if len(prompt) > _MOST_TOKENS:
        prompt = np.concatenate([prompt[: _MOST_TOKENS // 2], prompt[-_MOST_TOKENS // 2 :]])
    if tokenizer is None:
        return prompt
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
