"""The contract between the engine and the sources that propose draft tokens."""

import os
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from ..drafts.price import LevelPrice
from ..drafts.tree import DraftTree
from .committed import HIDDEN_STATES, LAST, SCORES, Committed
from .request import SourceRequest

TYPICAL_NODES = 16  # of drafts from texts, which cost by the node only
_OWN_REQUEST = "get_candidates"


class AssistedDecodingSource(CandidateGenerator):
    """The methods that transformers' own assisted decoding calls, made of a source's: one chain for one sequence."""

    _own_ids: np.ndarray | None = None  # the sequence of the latest call

    def get_candidates(  # type: ignore[misc, override]
        self: "TreeCandidateGenerator", input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, None]:
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
        seen = self._own_ids
        if seen is None or len(seen) > len(ids) or not np.array_equal(seen, ids[: len(seen)]):
            self.stop(_OWN_REQUEST)
            self.start(_OWN_REQUEST, ids)
        elif len(ids) > len(seen):
            pass_on(self, _OWN_REQUEST, Committed(ids[len(seen) :]))
        self._own_ids = ids
        chain = self.propose([_OWN_REQUEST], [self.default_num_nodes])[0].best_chain()
        draft = torch.from_numpy(chain.tokens).to(input_ids)
        return torch.cat([input_ids, draft[None]], dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Do nothing: `get_candidates` finds what was accepted by comparing sequences."""


class TreeCandidateGenerator(AssistedDecodingSource):
    """
    A candidate source for batches of requests. Subclass it, implement `start` or `begin`, `propose`, `observe` and
    `stop`, and pass an instance as `assistant=`.

    The engine calls `choose` and `begin`, which calls `start`, once per request, then `propose` and `observe` in turn,
    then `stop`, also after an error or a cancellation. One source may serve several `generate` calls, so state belongs
    to requests; it is not called by several threads at once. A source that raises, or proposes an invalid tree, is
    dropped for that request. Sources cannot make the output wrong: the target decides about every token.

    Attributes:
        default_num_nodes (`int`): Usual size of a draft, in nodes per row, where no price ends it: in models that run
            row by row, in rejection sampling, as a later source without prices, and in transformers' own loop.
        most_nodes (`int`, *optional*): Largest draft, in nodes per row, where a `GoodputAuction` decides; by default,
            `default_num_nodes`. For a first source, the `num_nodes` of a call takes the place of both.
        is_autoregressive (`bool`): Whether every level of a draft costs a forward of its own; then fewer levels are
            asked for where these do not pay.
        width (`int`): Nodes that an autoregressive source drafts per level.
        heeds_prices (`bool`): Whether `propose` takes a `price`, and ends drafts by itself where a further level, or
            node, is not worth it.
        heeds_shapes (`bool`): Whether `propose` takes a `price` that has `widths`, and gives drafts that shape; sources
            that heed prices may, too.
        follows_target (`bool`): Whether it drafts from results of the target's forward over the text before the last
            token. Such a source gets no calls of `propose` while a prompt is still being run.
        is_learned (`bool`): Whether it drafts with weights that were trained for targets like this one. Drafts that are
            hardly ever accepted then point to wrong weights, and are reported.
        needs (`frozenset` of `str`): What it needs beside tokens: "hidden_states" of the target, "scores" of the
            target. `observe` then gets a `Committed` in place of tokens.
        hidden_layers (sequence of `int`): The hidden states that it needs. k >= 0 is the residual stream after k
            decoder layers: the embeddings for 0, else the output of layer k - 1, which layer k reads, before any final
            norm. -1 is the last hidden state after the final norm, which the head reads. (As transformers'
            `hidden_states[k]`, except that the last of these is -1 here.)
        num_likeliest (`int`): Number of the target's likeliest next tokens that it uses, where these are available.
            `observe` then gets a `Committed` in place of tokens.
        observes_every_step (`bool`): Whether `observe` is called after every step. By default, what steps committed in
            which no source was asked comes at once, before the next `propose` or `stop` at the latest; where hidden
            states are needed, also that of steps which asked this source for other requests only. In every step where
            scores are needed.
        label (`str`): The kind of source that readers of a trace see, such as "suffix"; by default, the name of the
            class.
        weights_version (`int`): Count it up whenever the weights that it drafts with have changed while requests run,
            between two steps: results of the old weights are outdated.
        num_renewals (`int`): How often it has learnt so much that estimates from its earlier drafts are reset.
    """

    default_num_nodes: int = 5
    most_nodes: int | None = None
    is_autoregressive: bool = False
    width: int = 1
    heeds_prices: bool = False
    heeds_shapes: bool = False
    follows_target: bool = False
    is_learned: bool = False
    needs: frozenset[str] = frozenset()
    hidden_layers: Sequence[int] = (LAST,)
    num_likeliest: int = 0
    observes_every_step: bool = False
    label: str = ""
    weights_version: int = 0
    num_renewals: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "start" in own and "begin" not in own and cls.begin is not TreeCandidateGenerator.begin:
            raise TypeError(f"{cls.__name__} overrides `start`, which its parent does not call: override `begin`.")

    @property
    def name(self) -> str:
        """
        Name under which speed and acceptance of its drafts are estimated. Sources that draft from, or with, different
        things should differ in it.
        """
        return type(self).__name__

    @property
    def stages(self) -> Sequence["TreeCandidateGenerator"]:
        """The sources that the engine asks one after the other in place of this one; by default, the source itself."""
        return (self,)

    def choose(self, requests: Sequence[SourceRequest]) -> Sequence["TreeCandidateGenerator"]:
        """
        Return the source that drafts for each of these requests, which begin together. By default, the source itself; a
        source that consists of several, each for requests of its kind, names them, and only these get further calls.
        The length policy then learns what each is worth by itself.
        """
        return [self] * len(requests)

    def begin(self, request: SourceRequest) -> int | None:
        """
        Begin a request. By default, call `start`; override this method in its place to use more than the prompt.

        Returns:
            In sources that need hidden states: of how many of the first `request.num_cached` tokens the source can do
            without them, since it has kept its own results of these tokens for `request.shares_with`, or never uses
            them. The other tokens are run again, and fewer tokens are skipped where another source needs more, so that
            `Committed.start` may be less. None is 0.
        """
        self.start(request.request_id, request.prompt)
        return None

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        """Begin a request of which only the prompt is known (int64 `[prompt_len]`, no padding; it stays unchanged)."""
        if type(self).begin is TreeCandidateGenerator.begin:
            raise NotImplementedError(f"{type(self).__name__} must implement `start`.")
        self.begin(SourceRequest(request_id, prompt))

    @abstractmethod
    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        """
        Return one tree per request, for the whole batch at once, of at most `max_nodes[i]` nodes, whose root is the
        last committed token. With an empty tree, the step yields one token. A step may ask for some requests only.

        Sources that heed prices take a further argument, `price: LevelPrice | None = None`: what a further level must
        be worth in this step, in expected tokens (the sum of its nodes' path probabilities), and what a node must be.
        Forwards become dearer in steps: `price.beyond(depth)` is what the level after `depth` levels must be worth.
        A price with `widths` fixes the shape of drafts instead, for sources that heed shapes.
        Without a price, drafts have their usual size.
        """

    @abstractmethod
    def observe(self, request_id: Hashable, tokens: Any) -> None:
        """
        Take the tokens (int64 `[n]`) that were committed: every token of a request comes once, in order, after the step
        that verified it, or later, see `observes_every_step`. Sources with `needs` or `num_likeliest` get a
        `Committed`; with `needs`, also while the prompt is run.
        """

    @abstractmethod
    def stop(self, request_id: Hashable) -> None:
        """End a request, which may never have begun, and drop its state; see `SourceRequest.on_release`."""

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        """
        Return the label of the source that drafted each node of `tree`, all of which are in the latest draft; of
        several sources that drafted one node, the first. Called between `propose` and `observe`, for traced requests.
        """
        return [label_of(self)] * len(tree)

    def bytes_per_token(self) -> int:
        """
        Return the bytes of keys and values that it computes for every token of a text; engines count them. By default
        0: for sources without a model of their own.
        """
        return 0

    def bytes_per_request(self) -> int:
        """Return the bytes of states that it keeps for every request; engines count them. By default 0."""
        return 0


def label_of(source: TreeCandidateGenerator) -> str:
    return source.label or type(source).__name__


def saved_name(source: TreeCandidateGenerator) -> str:
    """
    Return the source's label and, for models and heads that were trained to draft, the folder or hub id that they were
    loaded from, so that what is measured of one is not taken for another's.
    """
    parts = getattr(source, "sources", None)
    if parts:
        return " + ".join(map(saved_name, parts))
    weights = getattr(source, "model", getattr(source, "heads", None)) if source.is_learned else None
    path = str(getattr(weights, "name_or_path", ""))
    place = os.path.realpath(path) if os.path.isdir(path) else path
    return f"{label_of(source)} ({place})" if place else label_of(source)


def most_nodes_of(source: TreeCandidateGenerator) -> int:
    """Return `most_nodes` of a source, or its default."""
    return source.default_num_nodes if source.most_nodes is None else source.most_nodes


def proposals_of(
    source: TreeCandidateGenerator,
    request_ids: Sequence[Hashable],
    max_nodes: Sequence[int],
    price: LevelPrice | None = None,
) -> list[DraftTree]:
    """Call `propose` of a source, with the price if it heeds prices, or the shape that the price fixes."""
    is_shaped = price is not None and bool(price.widths)
    heeds = source.heeds_prices or (source.heeds_shapes and is_shaped)
    arguments: dict[str, Any] = {"price": price} if heeds else {}
    return source.propose(request_ids, max_nodes, **arguments)


def adopt(source: TreeCandidateGenerator, parts: Sequence[TreeCandidateGenerator]) -> None:
    """Give a source the needs, and the largest numbers of nodes, of the sources that it consists of."""
    source.needs = frozenset[str]().union(*[part.needs for part in parts])
    source.hidden_layers = sorted(
        {layer for part in parts if HIDDEN_STATES in part.needs for layer in part.hidden_layers}
    )
    source.num_likeliest = max(part.num_likeliest for part in parts)
    source.observes_every_step = any(part.observes_every_step for part in parts)
    source.follows_target = all(part.follows_target for part in parts)
    source.default_num_nodes = max(part.default_num_nodes for part in parts)
    source.most_nodes = max(map(most_nodes_of, parts))


def pass_on(source: TreeCandidateGenerator, request_id: Hashable, step: Committed) -> None:
    """Call `observe` of a source with what it has asked for of a step, if there is any."""
    looks = HIDDEN_STATES in source.needs
    if not looks and not len(step.tokens):
        return  # a piece of a prompt
    if source.needs or source.num_likeliest:
        source.observe(request_id, step.only(source.hidden_layers if looks else (), SCORES in source.needs))
    else:
        source.observe(request_id, step.tokens)


def check_needs(source: TreeCandidateGenerator) -> None:
    """Raise `ValueError` if a source needs anything but hidden states and scores."""
    unknown = sorted(set(source.needs) - {HIDDEN_STATES, SCORES})
    if unknown:
        raise ValueError(
            f"{type(source).__name__} needs {unknown}, and sources can be given {[HIDDEN_STATES, SCORES]}: correct its "
            "`needs`."
        )


def refuse_needs(source: TreeCandidateGenerator, where: str) -> None:
    """Raise `ValueError` if a source needs hidden states or scores, where no target computes them."""
    if source.needs:
        raise ValueError(
            f"{type(source).__name__} needs the target's {' and '.join(sorted(source.needs))}, which {where} cannot "
            "give it: use it as `assistant=` of `model.generate` on an enabled model, or of an `Engine`."
        )


class NoCandidates(TreeCandidateGenerator):
    """A source that proposes nothing: decoding without speculation through the engine."""

    default_num_nodes = 0

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        pass

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.empty()] * len(request_ids)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        pass

    def stop(self, request_id: Hashable) -> None:
        pass
