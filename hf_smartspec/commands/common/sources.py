"""Candidate sources of benches, by name."""

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
from ...prepare.sources import resolve
from .arguments import UsageError
from .names import SOURCES


def check_simulated(names: Sequence[str], is_simulated: bool) -> None:
    """Raise `UsageError` for learned drafters in simulations, which have no hidden states."""
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
    Return a new source, without anything learnt.

    Args:
        name (`str`): One of `SOURCES`: "auto" is the source of `assistant="auto"`, "hybrid" suffix trees and the draft
            model as a list, "wrong" a source whose drafts are never accepted.
        target (`PreTrainedModel`): The target.
        drafter (`TreeCandidateGenerator`, *optional*): The source of "draft", and a part of "hybrid".
        wrong_token (`int`): A token that the target will not pick, for "wrong".
    """
    if name == "wrong":
        return WrongCandidates(wrong_token)
    if name == "prompt_lookup":
        return PromptLookupCandidates()
    if name == "suffix":
        return SuffixTreeCandidates()
    if name == "auto":
        source = resolve("auto", target).source
        if isinstance(source, SuffixTreeCandidates):  # one object for all calls of the model
            source.remove_namespace("")
        return source
    assert drafter is not None, "asked for where there is a draft only"
    if name == "draft":
        return drafter
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return StagedCandidates([SuffixTreeCandidates(), drafter], vocab_size=vocab_size)


class WrongCandidates(TreeCandidateGenerator):
    """
    Source whose drafts are always wrong, with high probabilities: policies must not get slower even by such a source.

    Args:
        token (`int`): The token of every node, which the target never picks.
        probability (`float`): The probability of every node.
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
