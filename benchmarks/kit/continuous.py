"""transformers' continuous batching, as the benches call it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import ContinuousBatchingConfig


def continuous_config(num_rows: int, longest: int, page: int = 32, **options: Any) -> ContinuousBatchingConfig:
    """
    Return a configuration whose cache has room for `num_rows` rows of the longest text, in tokens, and whose steps have
    up to 512 tokens.
    """
    num_pages = num_rows * -(-longest // page)
    return ContinuousBatchingConfig(page_size=page, num_blocks=num_pages, max_batch_tokens=512, **options)


def serve_lengths(manager: Any, prompts: Sequence[np.ndarray], lengths: Sequence[int]) -> dict[str, Any]:
    """
    Return the outputs of `generate_batch` by request, in order, where each request has a length of its own. Outputs are
    missing where the manager, which only logs errors, has stopped.
    """
    names = [
        manager.add_request(prompt.tolist(), max_new_tokens=length, eos_token_id=-1)
        for prompt, length in zip(prompts, lengths)
    ]
    found: dict[str, Any] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            found[output.request_id] = output
        elif output is None and not manager.is_running():
            break
    return {name: found[name] for name in names if name in found}
