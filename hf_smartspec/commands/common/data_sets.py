"""Data sets of benches: requests with recorded responses, and earlier requests that suffix trees remember."""

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
        name (`str`): Name in tables.
        prompts (list of lists of `int`): Distinct prompts.
        responses (list of `np.ndarray` of shape `[n]`, int64): The first tokens of each, as many as are generated.
        past (sequence of `Recording`): Earlier requests, which are not sent again.
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
        Return a data set with the first `num_past` texts as its past, and the next `limit` distinct prompts.

        Raises:
            UsageError: if no prompt is left.
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
    """Yield the texts as token ids: a conversation as one user's turn, a response up to `max_new_tokens`, or empty."""
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
    """Return the requests with the target's own answers, decoded greedily in batches."""
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
    Run the suffix trees of a source through earlier requests, as if it had drafted for them: the trees keep their
    outputs and learn which drafts are accepted. Other sources are left as they are.
    """
    for trees in (source, *getattr(source, "sources", ())):
        if isinstance(trees, SuffixTreeCandidates):
            for item in past:
                _decode(trees, item, namespace)


def _decode(trees: SuffixTreeCandidates, item: Recording, namespace: str) -> None:
    """Replay one request to the trees; all nodes that they draft are verified."""
    name, rest = object(), item.response
    trees.begin(SourceRequest(name, item.prompt, namespace=namespace))
    while len(rest):
        (tree,) = trees.propose([name], [trees.default_num_nodes])
        num_tokens = count_accepted(tree, rest) + 1
        trees.observe(name, rest[:num_tokens])
        rest = rest[num_tokens:]
    trees.stop(name)
