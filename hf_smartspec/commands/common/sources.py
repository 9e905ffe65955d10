"""The candidate sources of the benches of load, by name."""

from collections.abc import Hashable, Sequence

import numpy as np
from transformers import PreTrainedModel

from ...candidates import (
    PromptLookupCandidates,
    StagedCandidates,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
)
from ...drafts.tree import DraftTree
from ...prepare.resolve import resolve
from .arguments import UsageError
from .names import SOURCES


def check_simulated(names: Sequence[str], is_simulated: bool) -> None:
    """Raises `UsageError` where something is to be simulated with drafters that may need a target's hidden states."""
    learned = [name for name in names if name not in SOURCES]
    if learned and is_simulated:
        raise UsageError(
            f"{learned[0]!r} drafts on the real engine only: simulations have no hidden states, and the policy 'table' "
            "is made by one"
        )


def new_source(
    name: str, target: PreTrainedModel, drafter: TreeCandidateGenerator | None, wrong_token: int
) -> TreeCandidateGenerator:
    """
    A source that has learnt nothing yet.

    Args:
        name (`str`): One of `SOURCES`: "auto" is what `assistant="auto"` is, "hybrid" suffix trees and the draft model
            as a list, "wrong" a source whose drafts never come true.
        target (`PreTrainedModel`): What it drafts for.
        drafter (`TreeCandidateGenerator`, *optional*): For "draft" and "hybrid".
        wrong_token (`int`): One that the target will not say, for "wrong".
    """
    if name == "wrong":
        return WrongCandidates(wrong_token)
    if name == "prompt_lookup":
        return PromptLookupCandidates()
    if name == "suffix":
        return SuffixTreeCandidates()
    if name == "auto":
        source = resolve("auto", target).source
        if isinstance(source, SuffixTreeCandidates):  # one for all that the model serves
            source.remove_namespace("")
        return source
    assert drafter is not None, "asked for where there is a draft only"
    if name == "draft":
        return drafter
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return StagedCandidates([SuffixTreeCandidates(), drafter], vocab_size=vocab_size)


class WrongCandidates(TreeCandidateGenerator):
    """
    Always wrong, and sure of itself: even then, nothing may get slower.

    Args:
        token (`int`): Is proposed always, and never comes true.
        probability (`float`): That it claims for every node.
    """

    default_num_nodes = 8

    def __init__(self, token: int, probability: float = 0.9):
        self._chain = DraftTree.chain([token] * self.default_num_nodes, [probability] * self.default_num_nodes)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        pass

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._chain.most_likely(limit) for limit in max_nodes]

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        pass

    def stop(self, request_id: Hashable) -> None:
        pass
