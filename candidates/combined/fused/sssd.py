"""SSSD as published: one draft tree from the request's own text and a datastore."""

import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from ....drafts.merge import Draft, PathDiscount
from ....validate import check_positive
from ...base import TYPICAL_NODES, TreeCandidateGenerator
from ...text.datastore.file import Datastore
from ...text.datastore.input_trees import InputTreeCandidates
from ...text.datastore.source import DatastoreCandidates
from .source import FusedCandidates

_MOST_NODES = 63
_STRENGTH = 8.0  # paths


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
        calibration (mapping, *optional*): In place of these weights, factors that were measured on the target's own
            text: see `calibrate`, and `smartspec tune --sources sssd`, which searches the weights, too.
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
        calibration: Mapping[str, Sequence[Sequence[float]]] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        check_positive("max_prefix", max_prefix)
        for name, value in (("scale", scale), ("short", short), ("deep", deep)):
            if not 0 < value <= 1:
                raise ValueError(f"`{name}` must lie in (0, 1], got {value!r}.")
        sources: list[TreeCandidateGenerator] = [
            InputTreeCandidates(prefix, branch_len=branch_len) for prefix in range(1, max_prefix + 1)
        ]
        factors = _checked(calibration, max_prefix)
        of_input = PathDiscount.geometric(scale, short, deep, max_prefix, branch_len)
        discounts = [PathDiscount(factors["input"]) if factors else of_input] * len(sources)
        if datastore is not None:
            options = max_prefix, min_continuations, num_continuations, branch_len, breadth
            sources.append(DatastoreCandidates(datastore, None, *options, tokenizer=tokenizer))
            discounts.append(PathDiscount(factors.get("datastore", [[1.0]])))
        super().__init__(sources, discounts, min_probability=0.0, num_nodes=num_nodes)
        self.default_num_nodes, self.most_nodes = num_nodes or TYPICAL_NODES, num_nodes or _MOST_NODES
        self.label = "sssd"
        self._cells = max_prefix, branch_len

    def calibrate(self, texts: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, list[list[float]]]:
        """
        Return `calibration` by texts of the target (section 3.1.3): decoding is played with this source, and the
        probabilities of the paths to all nodes that its trees propose are compared with how often the text follows
        these paths.

        Args:
            texts (iterable of pairs): Prompts and responses, int64 `[n]` each; responses should be the target's own.

        Returns:
            `dict`: For "input" and "datastore", accepted over expected paths by match length and depth. Each drawn
            towards that of the whole source by 8 paths.
        """
        counts = {source.label: np.zeros((2, *self._cells)) for source in self.sources}
        for prompt, rest in texts:
            request_id = object()
            self.start(request_id, prompt)
            while len(rest):
                (tree,) = self.propose([request_id], [self.default_num_nodes])
                for source, draft in zip(self.sources, self._drafts[request_id]):
                    _count(counts[source.label], draft, rest.tolist())
                step = 1 + len(tree.path_along(rest))
                self.observe(request_id, rest[:step])
                rest = rest[step:]
            self.stop(request_id)
        return {label: _factors(*cells) for label, cells in counts.items()}


def _count(cells: np.ndarray, draft: Draft, truth: Sequence[int]) -> None:
    """Add path probabilities (`cells[0]`) and right paths (`cells[1]`) of all nodes whose outcome the text shows."""
    waiting = [(child, 1.0, True) for child in draft.children.get(-1, ())]
    while waiting:
        node, prob, is_right = waiting.pop()
        depth = draft.depths[node]
        if depth >= len(truth):
            continue
        prob, is_right = prob * draft.probs[node], is_right and draft.tokens[node] == truth[depth]
        cells[:, draft.match_lengths[node] - 1, depth] += prob, is_right
        waiting += [(child, prob, is_right) for child in draft.children.get(node, ())]


def _factors(expected: np.ndarray, right: np.ndarray) -> list[list[float]]:
    whole = (right.sum() + _STRENGTH) / (expected.sum() + _STRENGTH)
    found: list[list[float]] = ((right + _STRENGTH * whole) / (expected + _STRENGTH)).round(4).tolist()
    return found


def _checked(
    calibration: Mapping[str, Sequence[Sequence[float]]] | None, max_prefix: int
) -> Mapping[str, Sequence[Sequence[float]]]:
    factors = calibration or {}
    for name, rows in factors.items():
        are_valid = all(len(row) and all(0 <= factor < np.inf for factor in row) for row in rows)
        if len(rows) != max_prefix or not are_valid:
            raise ValueError(
                f"`calibration` must hold finite factors of at least 0 for {max_prefix} match lengths, got {rows!r} "
                f"for {name!r}."
            )
    if factors and "input" not in factors:
        raise ValueError(f"`calibration` must have factors for 'input', got them for {list(factors)}.")
    return factors
