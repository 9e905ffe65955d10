"""Drafts of any of a draft model's own tokens, encoded anew in the target's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ....drafts.tree import DraftTree
from .text import BROKEN, TranslatedText
from .translation import Translation, special_tokens

_LEAD = 4  # tokens before a draft, which decide how it begins
_REST = 3  # further ones, of a character of which the lead would begin with a part


class _Branch(NamedTuple):
    """A path through a tree, from the text to a leaf."""

    text: str  # what the way adds
    nodes: list[int]
    ends: list[int]  # where in the text each of these ends
    end_token: int | None  # a special token of the target's, which follows the text

    def node_at(self, place: int) -> int:
        """Return the first node whose text reaches a place."""
        return next((node for node, end in zip(self.nodes, self.ends) if end >= place), self.nodes[-1])


class _Piece(NamedTuple):
    """A token of the target's in a branch."""

    token: int
    node: int  # of the draft's tree, where the token ends


@dataclass(eq=False)
class _Merged:
    """Branches merged into one tree."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[set[int]] = field(default_factory=list)  # the draft's nodes that say the token
    _index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, pieces: list[_Piece]) -> None:
        node = -1
        for token, origin in pieces:
            parent, node = node, self._index.setdefault((node, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(parent)
                self.origins.append(set())
            self.origins[node].add(origin)

    def best(self, draft: DraftTree, limit: int) -> DraftTree:
        """Return the nodes that are likeliest to be reached."""
        of_draft = draft.path_probs.tolist()
        path_probs = [sum(of_draft[origin] for origin in origins) for origins in self.origins]
        above = [path_probs[parent] if parent >= 0 else 1.0 for parent in self.parents]
        # Rounding, and branches that reach a token earlier than others, may exceed the parent's probability.
        probs = [min(prob / of_parent, 1.0) if of_parent else 0.0 for prob, of_parent in zip(path_probs, above)]
        parents = np.array(self.parents, np.int64)
        return DraftTree(np.array(self.tokens, np.int64), parents, np.array(probs, np.float32)).most_likely(limit)


class Reencoding:
    """
    Converter of drafts to the target's tokens: every path through a tree is decoded and encoded anew after the last
    words of the text (string-level exact match: Timor et al., 2025, algorithm 2). So drafts reach tokens that the draft
    model does not have. Where the target would have joined a draft with the text before it, and has not, the draft is
    encoded by itself.

    Args:
        translation (`Translation`): Between two tokenizers, of which the target's returns where its tokens begin and
            end in a text (`is_possible`).
    """

    def __init__(self, translation: Translation):
        self.translation = translation
        special = list(special_tokens(translation.assistant_tokenizer).values())
        self._special = np.isin(np.arange(translation.draft_size), special)
        self._unknown = translation.tokenizer.unk_token_id
        self._edge = self._edge_of(translation)

    @staticmethod
    def is_possible(translation: Translation) -> bool:
        """
        Return whether the target's tokenizer returns where tokens lie in a text, and is a copy that any thread may use.
        """
        return bool(translation.tokenizer.is_fast) and translation.is_own

    @staticmethod
    def _edge_of(translation: Translation) -> str:
        """
        Return the text that precedes a draft which is encoded by itself: none, or a new line for tokenizers that would
        put a space before the draft.
        """
        ((ids, _),) = translation.encode_target(["a"])
        return "" if translation.decode([ids + ids]) == ["aa"] else "\n"

    def to_target(
        self, texts: Sequence[TranslatedText], trees: Sequence[DraftTree], limits: Sequence[int]
    ) -> list[DraftTree]:
        """
        Return trees of the draft's tokens as trees of the target's, with the same probabilities of reaching a place in
        the text, and no more nodes than their limits.
        """
        branches = self._branches(texts, trees)
        _, leads = _leads([text.ids for text in texts], self.translation.decode)
        flat = [(lead, branch) for lead, parts in zip(leads, branches) for branch in parts]
        pieces = iter(self._encoded([lead for lead, _ in flat], [branch for _, branch in flat]))
        found = []
        for tree, parts, limit in zip(trees, branches, limits):
            merged = _Merged()
            for _ in parts:
                merged.add(next(pieces))
            found.append(merged.best(tree, limit))
        return found

    def _branches(self, texts: Sequence[TranslatedText], trees: Sequence[DraftTree]) -> list[list[_Branch]]:
        """Return all paths through every tree, as far as they are text."""
        ways = [[_way_to(tree, node) for node in range(len(tree))] for tree in trees]
        leads, shown_leads = _leads([text.tokens for text in texts], self.translation.decode_draft)
        parts = [lead + tree.tokens[way].tolist() for lead, tree, own in zip(leads, trees, ways) for way in own]
        strings = iter(self.translation.decode_draft(parts))
        found = []
        for lead, tree, own in zip(shown_leads, trees, ways):
            shown = [next(strings)[len(lead) :].rstrip(BROKEN) for _ in own]
            found.append([self._branch(tree, way, shown) for way in _leaves(tree, own)])
        return found

    def _branch(self, tree: DraftTree, way: list[int], shown: list[str]) -> _Branch:
        tokens = tree.tokens[way]
        special = np.flatnonzero(self._special[tokens])
        num = int(special[0]) if len(special) else len(way)
        end_token = self.translation.shared_id(int(tokens[num])) if num < len(way) else None
        texts = [shown[node] for node in way[:num]]
        # Of bytes in a row, none is shown while their last character is incomplete: not the latest is the longest.
        return _Branch(max(texts, key=len, default=""), way[: num + 1], [len(text) for text in texts], end_token)

    def _encoded(self, leads: list[str], branches: list[_Branch]) -> list[list[_Piece]]:
        """Return branches in the target's tokens, encoded after their leads."""
        found = self._encoded_after(leads, branches)
        apart = [number for number, pieces in enumerate(found) if pieces is None]
        again = self._encoded_after([self._edge] * len(apart), [branches[number] for number in apart])
        for number, pieces in zip(apart, again):
            found[number] = pieces
        return [pieces or [] for pieces in found]

    def _encoded_after(self, leads: list[str], branches: list[_Branch]) -> list[list[_Piece] | None]:
        """Return branches encoded after their leads; None where a token lies across a lead's end."""
        strings = [lead + branch.text for lead, branch in zip(leads, branches)]
        found: list[list[_Piece] | None] = []
        for lead, branch, (ids, places) in zip(leads, branches, self.translation.encode_target(strings)):
            if any(first < len(lead) < last for first, last in places):
                found.append(None)
            else:
                found.append(self._pieces(len(lead), branch, ids, places))
        return found

    def _pieces(self, start: int, branch: _Branch, ids: list[int], places: list[tuple[int, int]]) -> list[_Piece]:
        """Return a branch that begins at `start`, as far as the target has tokens for it."""
        pieces: list[_Piece] = []
        for token, (first, last) in zip(ids, places):
            if first >= start:
                if token == self._unknown or token >= self.translation.target_size:
                    return pieces
                pieces.append(_Piece(token, branch.node_at(last - start)))
        if branch.end_token is not None:
            pieces.append(_Piece(branch.end_token, branch.nodes[-1]))
        return pieces


def _leads(
    texts: Sequence[list[int]], decode: Callable[[list[list[int]]], list[str]]
) -> tuple[list[list[int]], list[str]]:
    """Return the last tokens of texts, from the beginning of a character on, and their characters."""
    leads = [ids[-_LEAD:] for ids in texts]
    shown = decode(leads)
    for more in range(1, _REST + 1):
        broken = [number for number, string in enumerate(shown) if string.startswith(BROKEN)]
        for number in broken:
            leads[number] = texts[number][-_LEAD - more :]
        for number, string in zip(broken, decode([leads[number] for number in broken]) if broken else []):
            shown[number] = string
    return leads, shown


def _way_to(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes on the path to a node, itself included."""
    way = []
    while node >= 0:
        way.append(node)
        node = int(tree.parents[node])
    return way[::-1]


def _leaves(tree: DraftTree, ways: list[list[int]]) -> list[list[int]]:
    """Return the paths to nodes without children."""
    inner = set(tree.parents.tolist())
    return [way for node, way in enumerate(ways) if node not in inner]
