"""Tiny models, spying candidate sources and the comparison with plain `generate` for the tests in this folder."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import hf_smartspec
from hf_smartspec import DraftModelCandidates, DraftTree, TreeCandidateGenerator

from ..models import DEVICE

VOCAB_SIZE = 40
PAD, EOS, BOS = 0, 1, 2


def set_special_tokens(model: PreTrainedModel, eos: int | list[int] | None = EOS) -> PreTrainedModel:
    model.generation_config.pad_token_id = PAD
    model.generation_config.bos_token_id = BOS
    model.generation_config.eos_token_id = eos
    return model


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """About 20,000 parameters, wide enough apart that no two scores are nearly tied."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return set_special_tokens(LlamaForCausalLM(LlamaConfig(**settings | config)).eval().to(DEVICE))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Three special tokens, the letters, and eleven pairs of letters: words run over several tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(letters[i], letters[(5 * i + 7) % 26]) for i in range(11)]
    tokens = ["<pad>", "</s>", "<s>", *letters, *map("".join, merges)]
    assert len(tokens) == VOCAB_SIZE
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>", padding_side="left"
    )


def noisy_copy(model: PreTrainedModel, scale: float = 0.01, seed: int = 1) -> PreTrainedModel:
    """A draft that agrees with the target often, but not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)
    return draft


def prompts(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of random prompts, padded on the left, with its mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(BOS + 1, VOCAB_SIZE, (len(lengths), width), generator=generator)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": ids.masked_fill(mask == 0, PAD).to(DEVICE), "attention_mask": mask.to(DEVICE)}


class Spy(TreeCandidateGenerator):
    """Passes everything on to another source and counts what was drafted and what came true."""

    def __init__(self, source: TreeCandidateGenerator):
        self.source, self.default_num_nodes = source, source.default_num_nodes
        self.drafted = self.accepted = self.started = self.stopped = 0
        self._open: dict = {}

    def begin(self, request):
        self.started += 1
        self.source.begin(request)

    def propose(self, request_ids, max_nodes):
        trees = self.source.propose(request_ids, max_nodes)
        for request_id, tree in zip(request_ids, trees):
            self.drafted += len(tree)
            self._open[request_id] = tree
        return trees

    def observe(self, request_id, tokens):
        tree, node = self._open.pop(request_id, DraftTree.empty()), -1
        for token in tokens.tolist():
            node = tree.child(node, token)
            if node is None:
                break
            self.accepted += 1
        self.source.observe(request_id, tokens)

    def stop(self, request_id):
        self.stopped += 1
        self.source.stop(request_id)


class Oracle(TreeCandidateGenerator):
    """
    Drafts the continuations it was told (`acceptance` 1), or never a right token (`acceptance` 0).

    Args:
        sequences (`torch.LongTensor` of shape `[batch, length]`): What plain decoding generated, prompts included.
        mask (`torch.LongTensor`, *optional*): Of the prompts.
    """

    default_num_nodes = 4

    def __init__(self, sequences: torch.Tensor, mask: torch.Tensor | None = None, is_right: bool = True):
        self.is_right = is_right
        self._known = []
        for row, ids in enumerate(sequences):
            shown = torch.ones_like(ids).bool()
            if mask is not None:
                shown[: mask.shape[1]] = mask[row].bool()
            self._known.append(ids[shown].tolist())
        self._texts: dict = {}

    def start(self, request_id, prompt):
        self._texts[request_id] = prompt.tolist()

    def propose(self, request_ids, max_nodes):
        return [self._propose(self._texts[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, text, limit):
        known = next((ids for ids in self._known if ids[: len(text)] == text), text)
        draft = np.array(known[len(text) : len(text) + limit], np.int64)
        return DraftTree.chain(draft if self.is_right else (draft + 1) % VOCAB_SIZE)

    def observe(self, request_id, tokens):
        self._texts[request_id] += tokens.tolist()

    def stop(self, request_id):
        self._texts.pop(request_id, None)


def draft_source(model: PreTrainedModel, **options: Any) -> DraftModelCandidates:
    return DraftModelCandidates(noisy_copy(model), **options)


def check_same(
    model: PreTrainedModel,
    make: Callable[[], dict[str, Any]] | dict[str, Any],
    reference: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
    source: TreeCandidateGenerator | None = None,
    **ours: Any,
) -> tuple[torch.Tensor, Spy]:
    """
    Generates plainly and with an assistant, and checks that tokens are the same and that drafts were made and taken.

    Args:
        make: Keyword arguments of `generate`, or what makes them anew for each call (for those that keep state).
        reference: Those of the plain call, where they differ.
        ours: Further arguments of the call with an assistant only.
    """
    build = lambda given: given() if callable(given) else given  # noqa: E731
    expected = model.generate(**build(make if reference is None else reference))
    spy = Spy(source or draft_source(model))
    with hf_smartspec.enabled(model):
        actual = model.generate(**build(make), **ours, assistant=spy)
    sequences = [item if isinstance(item, torch.Tensor) else item.sequences for item in (expected, actual)]
    assert sequences[1].tolist() == sequences[0].tolist()
    assert spy.drafted > 0, "nothing was drafted"
    assert spy.accepted > 0, "no draft was accepted"
    assert spy.started == spy.stopped == len(sequences[0])
    return actual, spy


def both(model, assistant, seed=None, **kwargs):
    """What plain decoding gives, and what speculation does."""
    with hf_smartspec.enabled(model):
        plain = model.generate(**kwargs, **({} if seed is None else {"seed": seed, "do_sample": True}))
        kwargs |= {} if seed is None else {"seed": seed, "do_sample": True}
        return plain, model.generate(**kwargs, assistant=assistant)


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for item in output.values() if isinstance(output, dict) else output:
            yield from tensors_of(item)
