"""Pairs of tokenizers that differ, and models for them."""

import copy
import json
import random
from collections.abc import Sequence
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyzäöü0123456789"
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the other foxes think that this was the thing to do.",
    "def add(first, second):\n    return first + second\n\n\ndef subtract(first, second):\n    return first - second\n",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein; 日本語も少し。 naïve café — 12 345 things 🙂🙂",
]


def character_tokenizer(characters: str, joined: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token for each, and for pairs that are joined: without these, texts are cut in one way, whatever they say."""
    names = ["<pad>", *characters, *joined]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [(*pair,) for pair in joined]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


def other_characters(seed: int = 0) -> str:
    """In another order, some missing, some more."""
    characters = [*CHARACTERS[:-4], *"ABCDEFG"]
    random.Random(seed).shuffle(characters)
    return "".join(characters)


def with_tokens_of(model: PreTrainedModel, own: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast, size: int):
    """A copy of a model of another tokenizer: what both have means the same, the rest is as large as any."""
    model = copy.deepcopy(model)
    known, generator = own.get_vocab(), torch.Generator().manual_seed(1)
    names = {number: name for name, number in other.get_vocab().items()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        old = module.weight.detach()
        new = torch.randn(size, old.shape[1], generator=generator) * old.std()
        for number, name in names.items():
            if name in known:
                new[number] = old[known[name]]
        module.weight = torch.nn.Parameter(new, requires_grad=False)
    model.config.vocab_size = size
    return model.requires_grad_(False)


@cache
def byte_level(size: int = 500) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>", "<|user|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", extra_special_tokens=["<|user|>"], pad_token="<|end|>"
    )


@cache
def sentence_piece() -> PreTrainedTokenizerFast:
    """Spaces are part of tokens under another sign, and one is put before every text."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "<|end|>", *[f"<0x{number:02X}>" for number in range(256)]]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    spec = json.loads(backend.to_str())  # only a trainer takes the bytes for special tokens
    spec["added_tokens"] = spec["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|end|>", unk_token="<unk>", pad_token="<unk>"
    )


TOKENIZERS = {"bytes": byte_level, "fewer bytes": lambda: byte_level(300), "pieces": sentence_piece}
