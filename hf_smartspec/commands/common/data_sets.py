"""What the benches of the target ask: requests with their recorded responses, and a past that suffix trees remember."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...candidates import SuffixTreeCandidates, TreeCandidateGenerator
from ...candidates.request import SourceRequest
from .arguments import UsageError
from .models import encode, left_padded
from .progress import track
from .recordings import Recording, Texts, count_accepted
from .runs import eos_ids, up_to_end


class DataSet(NamedTuple):
    """
    Prompts and their recorded responses as token ids, in the order in which they arrive.

    Args:
        name (`str`): Shown in tables.
        prompts (list of lists of `int`): Different ones.
        responses (list of `np.ndarray` of shape `[n]`, int64): As much of each as is generated.
        past (sequence of `Recording`): Earlier requests, which are not asked any more.
    """

    name: str
    prompts: list[list[int]]
    responses: list[np.ndarray]
    past: Sequence[Recording] = ()

    @classmethod
    def of(
        cls,
        name: str,
        texts: Sequence[Texts],
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        num_past: int,
        max_prompt: int,
        max_new_tokens: int,
    ) -> "DataSet":
        """
        The first `num_past` texts as the past, and the first `limit` different prompts behind them.

        Raises:
            UsageError: if nothing is left to ask.
        """
        past = list(_tokenized(texts[:num_past], tokenizer, max_prompt, max_new_tokens))
        asked: dict[bytes, Recording] = {}
        for item in _tokenized(texts[num_past:], tokenizer, max_prompt, max_new_tokens):
            asked.setdefault(item.prompt.tobytes(), item)
            if len(asked) == limit:
                break
        if not asked and num_past >= len(texts):
            raise UsageError(f"--remember: {name!r} has {len(texts)} requests, of which {num_past} leave none to ask")
        if not asked:
            raise UsageError(f"{name!r}: the tokenizer makes no tokens of the prompts")
        prompts = [item.prompt.tolist() for item in asked.values()]
        return cls(name, prompts, [item.response for item in asked.values()], past)


def _tokenized(
    texts: Sequence[Texts], tokenizer: PreTrainedTokenizerBase, max_prompt: int, max_new_tokens: int
) -> Iterator[Recording]:
    """Conversations are one user's turn; of responses, as much as is generated; there may be none."""
    for item in texts:
        prompts = encode(["\n".join(item.context)], tokenizer, max_prompt)
        response = tokenizer(item.response, add_special_tokens=False, verbose=False).input_ids[:max_new_tokens]
        if prompts and (response or not item.response):
            yield Recording(np.array(prompts[0], np.int64), np.array(response, np.int64))


@torch.no_grad()
def answered(
    past: Sequence[Recording],
    model: PreTrainedModel,
    batch_size: int,
    max_new_tokens: int,
    desc: str = "answering what is remembered",
) -> list[Recording]:
    """The same requests with what the target answers, decoded greedily in batches."""
    pad_id, ends, result = model.generation_config.pad_token_id, set(eos_ids(model)), []
    with track(total=len(past), desc=desc) as progress:
        for first in range(0, len(past), batch_size):
            items = past[first : first + batch_size]
            inputs = left_padded([item.prompt for item in items], pad_id, model.device)
            found: Any = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
            begin = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
            rows = found[:, begin:].tolist()
            result += [
                Recording(item.prompt, np.array(up_to_end(row, ends), np.int64)) for item, row in zip(items, rows)
            ]
            progress.update(len(items))
    return result


def remember(source: TreeCandidateGenerator, past: Sequence[Recording], namespace: str = "") -> None:
    """
    Has the suffix trees of a source go through earlier requests, as if it had drafted for them: their outputs are kept,
    and it is learnt which drafts come true. Other sources remember nothing.
    """
    for trees in (source, *getattr(source, "sources", ())):
        if isinstance(trees, SuffixTreeCandidates):
            for item in past:
                _decode(trees, item, namespace)


def _decode(trees: SuffixTreeCandidates, item: Recording, namespace: str) -> None:
    """One request, as a target would decode it that verifies all that is drafted."""
    name, rest = object(), item.response
    trees.begin(SourceRequest(name, item.prompt, namespace=namespace))
    while len(rest):
        (tree,) = trees.propose([name], [trees.default_num_nodes])
        num_tokens = count_accepted(tree, rest) + 1
        trees.observe(name, rest[:num_tokens])
        rest = rest[num_tokens:]
    trees.stop(name)
