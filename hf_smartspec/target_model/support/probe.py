"""
Probes: comparison of several tokens at once, and rows of different lengths side by side, with decoding token by token.
"""

import inspect
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ...cpu.quantized import unrounded_tokens
from ...drafts.tree import DraftTree
from ..compat import renewal_length
from ..encoded import EncodedForward
from ..forward.packed import PackedForward
from ..forward.rotary import forget_lengths
from ..forward.rowwise import RowwiseForward
from ..layout.rows import CacheRow, RowInput
from ..recurrent.functions import recurrent_layers

_TOLERANCE = 1e-3  # relative to the logits' spread, in float32
# The same, root mean square of a line, in half precision: 0.12 in SmolLM2-135M in bfloat16, 1.5 with a wrong tree.
_GROSS = 0.6


class Forward(Protocol):
    """Attributes of `PackedForward` and `RowwiseForward` that a probe uses."""

    trees: bool

    def add(self) -> CacheRow: ...
    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]: ...
    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None: ...


class Probe:
    """
    Texts, and the logits that the model computes one token at a time.

    Args:
        model (`PreTrainedModel`): A decoder that generates by itself; it is left as it was.
        prompt_lens (sequence of `int`): Lengths of the batch's prompts, which are padded on the left.
        num_tokens (`int`): Tokens after the prompts.
    """

    def __init__(self, model: PreTrainedModel, prompt_lens: Sequence[int], num_tokens: int):
        self.model, self.num_tokens, self.width = model, num_tokens, max(prompt_lens)
        size = model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng(0)
        self.texts = [rng.integers(3, size, length + num_tokens) for length in prompt_lens]
        self.prompt_lens = prompt_lens
        pads = [self.width - length for length in prompt_lens]
        padded = np.stack([np.pad(text, (pad, 0)) for text, pad in zip(self.texts, pads)])
        self.ids: Any = torch.from_numpy(padded).to(model.device)
        self.mask = (torch.arange(self.width)[None] >= torch.tensor(pads)[:, None]).long().to(model.device)

    @torch.no_grad()
    @unrounded_tokens()
    def agrees(self, way: type[PackedForward] | type[RowwiseForward]) -> bool:
        """Return whether forwards of that kind give the logits of decoding token by token."""
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            self.model.eval()
            forget_lengths(self.model)
            recurrent = recurrent_layers(self.model)
            with nullcontext() if recurrent is None else recurrent.as_written():
                expected = self._plain_logits()
            forget_lengths(self.model)
            return self._compare(self._forward(way), expected)
        except Exception:  # a model that fails in any way is decoded without speculation
            return False
        finally:
            for module, mode in modes:
                module.training = mode

    def _kwargs(self) -> dict[str, Any]:
        """Return the arguments that `generate` prepares."""
        kwargs: dict[str, Any] = {"attention_mask": self.mask, "use_cache": True}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            kwargs["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return kwargs

    def _plain_logits(self) -> torch.Tensor:
        """Return the logits after the prompts and after every further token, `[num_tokens + 1, rows, vocab_size]`."""
        model: Any = self.model
        kwargs, ids = self._kwargs(), self.ids[:, : self.width]
        mode = GenerationMode.GREEDY_SEARCH
        model._prepare_cache_for_generation(GenerationConfig(), kwargs, mode, len(ids), self.ids.shape[1])
        inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
        logits = []
        for end in range(self.width, self.ids.shape[1] + 1):
            output = model(**inputs, return_dict=True)
            logits.append(output.logits[:, -1].float())
            kwargs = model._update_model_kwargs_for_generation(output, kwargs)
            inputs = model.prepare_inputs_for_generation(self.ids[:, : end + 1], next_sequence_length=1, **kwargs)
        return torch.stack(logits)

    def _forward(self, way: type[PackedForward] | type[RowwiseForward]) -> Forward:
        if way is PackedForward:
            return PackedForward(self.model, len(self.texts), self.ids.shape[1] + 8, prefill_chunk=16)
        return RowwiseForward(self.model, self.ids[:, : self.width], self._kwargs(), GenerationConfig())

    def _compare(self, forward: Forward, expected: torch.Tensor) -> bool:
        """
        Run drafts of several sizes, accepted wholly or in part, until the texts end; return whether all logits agree.
        """
        rows = [self._add(forward, length) for length in self.prompt_lens]
        done = 0  # tokens after the prompts that are cached or fed next
        for size, num_accepted in itertools.cycle(((3, 2), (1, 0), (4, 4), (2, 2))):
            ends = [length + done for length in self.prompt_lens]
            rooms = (row.room(end) for row, end in zip(rows, ends))
            size = min(size, self.num_tokens - done, *(max(room, 0) for room in rooms if room is not None))
            num_accepted = min(num_accepted, size)
            inputs = [
                RowInput(row, _uncached(row, text, end), _draft(text[end : end + size], forward.trees))
                for row, text, end in zip(rows, self.texts, ends)
            ]
            logits, offsets = forward.forward(inputs)
            path = list(range(1, 2 * size, 2)) if forward.trees else list(range(size))
            for index, offset in enumerate(offsets):
                lines = [offset, *(offset + 1 + node for node in path)]
                if not alike(logits[lines], expected[done : done + size + 1, index], self.model.dtype != torch.float32):
                    return False
            forward.commit(rows, [path[:num_accepted]] * len(rows))
            done += num_accepted + 1
            if done > self.num_tokens:
                return True
        raise AssertionError("unreachable")

    def _add(self, forward: Forward, prompt_len: int) -> CacheRow:
        row, renewal = forward.add(), renewal_length(self.model)
        row.ahead, row.least_length = self.width - prompt_len, self.width
        row.renewal = None if renewal is None else renewal - row.ahead
        return row


def _uncached(row: CacheRow, text: np.ndarray, end: int) -> np.ndarray:
    if row.is_due(end):
        row.renew()
    return text[row.length : end]


def _draft(tokens: np.ndarray, is_tree: bool) -> DraftTree:
    """Return the tokens as a chain, or as every second node of a tree, each after a sibling."""
    if not is_tree:
        return DraftTree.chain(tokens)
    nodes = np.stack([np.roll(tokens, 1) + 1, tokens], axis=1).flatten() % (tokens.max(initial=0) + 1)
    nodes[1::2] = tokens
    parents = np.repeat(np.arange(len(tokens)) * 2 - 1, 2)
    return DraftTree(nodes, np.maximum(parents, -1), np.ones(len(nodes), np.float32))


@torch.no_grad()
@unrounded_tokens()
def agrees_with_encoder(model: PreTrainedModel, way: type[PackedForward] | type[RowwiseForward]) -> bool:
    """
    Return whether chains in a decoder with cross attention, or every second node of a tree, accepted in part, whole and
    not at all, give the logits of decoding token by token: for an encoded text, and for a shorter one, which is padded.
    """
    size = model.config.get_text_config(decoder=True).vocab_size
    text = (torch.arange(3, 14, device=model.device) * 7 % size).repeat(2, 1)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=model.device)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        encoded = model.get_encoder()(input_ids=text[:, :4], attention_mask=mask, return_dict=True)
        kwargs: dict[str, Any] = {"encoder_outputs": encoded, "attention_mask": mask}
        forward: Forward
        if way is PackedForward:
            forward = EncodedForward(model)
            rows = forward.encode(encoded, mask)
        else:
            forward = RowwiseForward(model, text[:, :5], kwargs | {"use_cache": True}, GenerationConfig())
            rows = [forward.add(), forward.add()]
        start, tokens = 0, text[0].cpu().numpy()
        # Tokens to feed, to draft, and of these to accept.
        for num_fed, num_drafted, num_accepted in ((5, 3, 1), (1, 2, 2), (1, 1, 0)):
            end = start + num_fed
            draft = _draft(tokens[end : end + num_drafted], forward.trees)
            logits, offsets = forward.forward([RowInput(row, tokens[start:end], draft) for row in rows])
            path = list(range(1, 2 * num_drafted, 2)) if forward.trees else list(range(num_drafted))
            for line, length in zip([0, *[1 + node for node in path]], range(end, end + num_drafted + 1)):
                expected = model(decoder_input_ids=text[:, :length], **kwargs, return_dict=True).logits[:, -1]
                if not alike(logits[[offset + line for offset in offsets]], expected, model.dtype != torch.float32):
                    return False
            forward.commit(rows, [path[:num_accepted]] * 2)
            start = end + num_accepted
        return True
    except Exception:  # as in `Probe.agrees`
        return False
    finally:
        for module, mode in modes:
            module.training = mode


def alike(actual: torch.Tensor, expected: torch.Tensor, is_coarse: bool = False) -> bool:
    """
    Return whether lines of logits `[M, vocab_size]` are the same up to rounding. In half precision, rounding adds up
    over layers: then only gross errors stand out, and a float32 twin shows the others.
    """
    error, spread = actual.float() - expected.float(), expected.float().std()
    if is_coarse:
        return bool(error.square().mean(-1).sqrt().max() <= _GROSS * spread)
    return bool(error.abs().max() <= _TOLERANCE * spread)
