"""SSSD as published: one draft tree from the request's own text and a datastore."""

import os

from transformers import PreTrainedTokenizerBase

from ....drafts.merge import PathDiscount
from ....validate import check_positive
from ...base import TYPICAL_NODES, TreeCandidateGenerator
from ...text.datastore.file import Datastore
from ...text.datastore.input_trees import InputTreeCandidates
from ...text.datastore.source import DatastoreCandidates
from .source import FusedCandidates

_MOST_NODES = 63


class SSSDCandidates(FusedCandidates):
    """
    Drafts as in "SSSD: Simply-Scalable Speculative Decoding", section 3.1: a tree for each prefix of 1 to P tokens over
    the prompt and the output so far (`InputTreeCandidates`), a tree of the continuations in a datastore
    (`DatastoreCandidates`), and one queue over all of them, by path probabilities times `discount(source, depth)`
    (algorithm 1).

    The paper gives no values of its weights, which it finds by a grid search. Here the path to a node at depth d of the
    input's tree for m tokens counts `scale * short ** (P - m) * deep ** (d - 1)`, and the datastore's count fully.
    Nothing is learnt while decoding.

    Args:
        datastore (`Datastore`, `str` or `os.PathLike`, *optional*): The text, or its file; none: the input alone.
        num_nodes (`int`, *optional*): Nodes per row where the caller names no number. Where not given, 16, and up to 63
            where a policy decides.
        max_prefix (`int`): P, the longest prefix that is looked for, in tokens.
        scale (`float`): Factor on the input's probabilities, which are too high.
        short (`float`): Further factor for each token by which a match is shorter than P.
        deep (`float`): Further factor for each level below the first.
        num_continuations (`int`): M, continuations that are picked in the datastore per prefix, at most.
        min_continuations (`int`): Shorter prefixes are tried in the datastore until one has so many continuations.
        branch_len (`int`): Tokens per continuation, at most.
        breadth (`int`): Continuations from the datastore have at most `n / breadth` tokens in a draft of n nodes
            (section 4.3).
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; the datastore must have been built with it.

    Raises:
        ValueError: for numbers out of range, files that are no valid datastore, and another tokenizer.
    """

    def __init__(
        self,
        datastore: Datastore | str | os.PathLike[str] | None = None,
        num_nodes: int | None = None,
        max_prefix: int = 4,
        scale: float = 0.8,
        short: float = 0.9,
        deep: float = 0.95,
        num_continuations: int = 100,
        min_continuations: int = 10,
        branch_len: int = 8,
        breadth: int = 2,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        check_positive("max_prefix", max_prefix)
        for name, value in (("scale", scale), ("short", short), ("deep", deep)):
            if not 0 < value <= 1:
                raise ValueError(f"`{name}` must lie in (0, 1], got {value!r}.")
        sources: list[TreeCandidateGenerator] = [
            InputTreeCandidates(prefix, branch_len=branch_len) for prefix in range(1, max_prefix + 1)
        ]
        discounts = [PathDiscount.geometric(scale, short, deep, max_prefix, branch_len)] * len(sources)
        if datastore is not None:
            options = max_prefix, min_continuations, num_continuations, branch_len, breadth
            sources.append(DatastoreCandidates(datastore, None, *options, tokenizer=tokenizer))
            discounts.append(PathDiscount([[1.0]]))
        super().__init__(sources, discounts, min_probability=0.0, num_nodes=num_nodes)
        self.default_num_nodes, self.most_nodes = num_nodes or TYPICAL_NODES, num_nodes or _MOST_NODES
        self.label = "sssd"
