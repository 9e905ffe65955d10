"""The contract between the engine and whatever proposes draft tokens."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from ..drafts.tree import DraftTree
from .committed import HIDDEN_STATES, LAST, SCORES, Committed, Likeliest
from .request import SourceRequest

TYPICAL_NODES = 16  # of drafts from texts, which cost by the node only
_OWN_REQUEST = "get_candidates"


class TreeCandidateGenerator(CandidateGenerator):
    """
    A candidate source for batches of requests. Subclass it, implement `start`, `propose`, `observe` and `stop`, and
    pass an instance as `assistant=`.

    The engine calls `choose` and `begin`, which calls `start`, once per request, then `propose` and `observe` in turn,
    then `stop`; `stop` comes even after an error. One source may serve several `generate` calls, so state belongs to
    requests; it need not bear several threads at once. A source that raises, or proposes something that is no tree over
    the vocabulary, is dropped for that request. Sources cannot make the output wrong: the target decides about every
    token.

    Attributes:
        default_num_nodes (`int`): Nodes per row where the caller names no number, at most.
        is_autoregressive (`bool`): Whether every level of a draft costs a forward of its own; then fewer levels are
            asked for where these do not pay.
        width (`int`): Nodes per level that it drafts, if so.
        heeds_prices (`bool`): Whether `propose` takes a `price`, and ends drafts by itself where a further level, or
            node, is not worth that.
        follows_target (`bool`): Whether it drafts from what the target's forward has left of the text before the last
            token: while a prompt is still being run, it is not asked.
        is_learned (`bool`): Whether it drafts with weights that were trained for targets like this one, so that drafts
            which are hardly ever accepted mean wrong ones, and are reported.
        needs (`frozenset` of `str`): What it must be told of beside tokens: "hidden_states" of the target, "scores" of
            the target. `observe` then gets a `Committed` in place of tokens.
        hidden_layers (sequence of `int`): Which hidden states. k >= 0 is the residual stream behind k decoder layers:
            the embeddings for 0, else the output of layer k - 1, which layer k reads, before any final norm. -1 is the
            last hidden state behind the final norm, which the head reads. (As transformers' `hidden_states[k]`, but for
            the last of these, which is -1 here.)
        label (`str`): What kind of source readers are told that a token was drafted by, such as "suffix"; by default
            the name of the class.
        num_likeliest (`int`): Of how many of the target's likeliest next tokens `observe_likeliest` is told. Unlike
            what a source needs, it does without where they cannot be had.
    """

    default_num_nodes: int = 5
    is_autoregressive: bool = False
    width: int = 1
    heeds_prices: bool = False
    follows_target: bool = False
    is_learned: bool = False
    needs: frozenset[str] = frozenset()
    hidden_layers: Sequence[int] = (LAST,)
    num_likeliest: int = 0
    label: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "start" in own and "begin" not in own and cls.begin is not TreeCandidateGenerator.begin:
            raise TypeError(f"{cls.__name__} overrides `start`, which its parent does not call: override `begin`.")

    @property
    def name(self) -> str:
        """
        Tells sources apart: what is learnt about one, its speed and what its drafts are worth, is kept under its name.
        Sources that differ in what they draft from, or with, should differ in it.
        """
        return type(self).__name__

    @property
    def most_nodes(self) -> int:
        """Nodes per row at most, where goodput decides how many there are."""
        return self.default_num_nodes

    @property
    def stages(self) -> Sequence["TreeCandidateGenerator"]:
        """The sources that it consists of, in the order in which they are asked: most are one."""
        return (self,)

    @property
    def origin(self) -> "TreeCandidateGenerator":
        """What drafts, behind a source that does no more than pass everything on: most are it themselves."""
        return self

    def choose(self, requests: Sequence[SourceRequest]) -> Sequence["TreeCandidateGenerator"]:
        """
        Return the source that drafts for each of these requests, which begin together. By default, the source itself; a
        source that consists of several, each for requests of its kind, names them, and only these get further calls.
        The length policy then learns what each is worth by itself.
        """
        return [self] * len(requests)

    def begin(self, request: SourceRequest) -> None:
        """Begin a request. By default, call `start`; override this method in its place to use more than the prompt."""
        self.start(request.request_id, request.prompt)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        """Begin a request of which only the prompt is known (int64 `[prompt_len]`, no padding; it stays unchanged)."""
        if type(self).begin is TreeCandidateGenerator.begin:
            raise NotImplementedError(f"{type(self).__name__} must implement `start`.")
        self.begin(SourceRequest(request_id, prompt))

    @abstractmethod
    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        """
        One tree per request, for the whole batch at once, of at most `max_nodes[i]` nodes, hanging on the last
        committed token. An empty tree means "no idea": the step then yields one token. Not every request is asked at
        every step.

        Sources that heed prices take a further argument, `price: LevelPrice | None = None`: what a further level must
        be worth in this step, in expected tokens (the sum of its nodes' path probabilities), and what a node must be.
        Forwards become dearer in steps: `price.beyond(depth)` is what the level behind `depth` levels must be worth.
        None where nobody decides that: drafts then have their usual size.
        """

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        """
        Comes between `propose` and `observe`, of requests that are traced: who drafted each node of `tree`, all of
        which are in the source's latest draft. By default, the source itself, by its `label`; one that consists of
        several names them. Of those that drafted the same node, the first one is named.
        """
        return [label_of(self)] * len(tree)

    def reuse(self, request_id: Hashable, length: int, earlier: Hashable | None) -> int:
        """
        Comes after `begin`, and only in sources that need hidden states, where keys and values of the first `length`
        tokens of the prompt are there already: those of the text of `earlier`, a request that runs or has ended, which
        other sources may have drafted for (None: a cache that the caller brought along).

        It may be asked again with a smaller `length`, since another source can do without fewer tokens. Only the last
        answer counts, and must be as if nothing had been asked before.

        Returns:
            How many of these tokens the source can do without hidden states of, since it has kept what it made of them
            for `earlier`, or never looks back: 0 to `length`. The others are run again. By default 0.
        """
        return 0

    @abstractmethod
    def observe(self, request_id: Hashable, tokens: Any) -> None:
        """
        Tokens (int64 `[n]`) were committed: every token of a request is shown once, in order, when verified. Sources
        with `needs` get a `Committed`, also while the prompt is run.
        """

    def show(self, request_id: Hashable, committed: Committed) -> None:
        """Hands `observe` what the source has asked for of a step that may be shown to others too."""
        looks = HIDDEN_STATES in self.needs
        if not looks and not len(committed.tokens):
            return  # a piece of a prompt
        if self.needs:
            committed = committed.only(self.hidden_layers if looks else (), SCORES in self.needs)
        self.observe(request_id, committed if self.needs else committed.tokens)

    def observe_likeliest(self, shown: Mapping[Hashable, Likeliest]) -> None:
        """
        What the target thinks may follow the last committed token of requests, and each node of their drafts, which may
        turn out wrong. Comes in sources with `num_likeliest`, before `observe`; not of every request at every step. By
        default, nothing happens.
        """

    @abstractmethod
    def stop(self, request_id: Hashable) -> None:
        """
        The request has ended, or never started; its state can go, but for what `reuse` may bring back until `forget`.
        Unknown ids must be ignored.
        """

    def forget(self, request_id: Hashable) -> None:
        """
        Comes some time behind `stop`, in sources that need hidden states: no `reuse` will name this request any more,
        since its keys and values have gone too. Unknown ids must be ignored. By default, nothing happens.
        """

    def num_bytes(self) -> int | None:
        """What it keeps of texts at present (keys and values, trees, ...), weights aside; None where nobody knows."""
        return None

    num_renewals = 0  # how often it has learnt so much that what its drafts were worth before says little

    def weights_changed(self) -> None:
        """
        Comes between two steps, where what it drafts with has learnt: what was computed with the old weights counts no
        more. By default, nothing happens.
        """

    # transformers' own contract, for use in its assisted decoding: the best chain for one sequence.

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, None]:  # type: ignore[override]
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[1, length]`): The sequence so far.

        Returns:
            `torch.LongTensor` of shape `[1, length + k]`, the sequence and k draft tokens, and None for their logits.

        Raises:
            ValueError: for more than one sequence, which transformers' loop does not know.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"`get_candidates` drafts for one sequence, got a batch of {input_ids.shape[0]}.")
        refuse_needs(self, "transformers' own loop")
        ids = input_ids[0].cpu().numpy()
        seen = getattr(self, "_own_ids", None)
        if seen is None or len(seen) > len(ids) or not np.array_equal(seen, ids[: len(seen)]):
            self.stop(_OWN_REQUEST)
            self.start(_OWN_REQUEST, ids)
        elif len(ids) > len(seen):
            self.observe(_OWN_REQUEST, ids[len(seen) :])
        self._own_ids = ids
        chain = self.propose([_OWN_REQUEST], [self.default_num_nodes])[0].best_chain()
        draft = torch.from_numpy(chain.tokens).to(input_ids)
        return torch.cat([input_ids, draft[None]], dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to do: what was accepted is seen by comparing sequences."""


def label_of(source: TreeCandidateGenerator) -> str:
    return source.label or type(source).__name__


_Source = TypeVar("_Source")


def common_reuse(sources: Sequence[_Source], length: int, ask: Callable[[_Source, int], int | None]) -> int:
    """
    How many of `length` tokens all of some sources can do without. What one must be shown again, all are: who was asked
    before and can do without more is asked anew.

    Args:
        ask (`Callable`): A source's `reuse` of so many tokens, no more than these; None where it has failed, and counts
            no longer.
    """
    granted = [length + 1] * len(sources)
    while asking := [place for place, num in enumerate(granted) if num > length]:
        for place in asking:
            answer = ask(sources[place], length)
            granted[place] = 0 if answer is None else answer
            length = length if answer is None else answer
    return length


def check_needs(source: TreeCandidateGenerator) -> None:
    """Raises `ValueError` if a source needs what there is not."""
    unknown = sorted(set(source.needs) - {HIDDEN_STATES, SCORES})
    if unknown:
        raise ValueError(
            f"{type(source).__name__} needs {unknown}, and sources can be given {[HIDDEN_STATES, SCORES]}: correct its "
            "`needs`."
        )


def refuse_needs(source: TreeCandidateGenerator, where: str) -> None:
    """Raises `ValueError` if a source needs hidden states or scores, where there is no target to have them from."""
    if source.needs:
        raise ValueError(
            f"{type(source).__name__} needs the target's {' and '.join(sorted(source.needs))}, which {where} cannot "
            "give it: use it as `assistant=` of `model.generate` on an enabled model, or of an `Engine`."
        )


class NoCandidates(TreeCandidateGenerator):
    """Proposes nothing: plain decoding through the engine."""

    default_num_nodes = 0

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        pass

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.empty()] * len(request_ids)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        pass

    def stop(self, request_id: Hashable) -> None:
        pass
