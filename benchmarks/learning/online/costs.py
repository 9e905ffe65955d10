"""
Memory, FLOPs and memory traffic of a target and its drafter, from their configs (Online Speculative Decoding, sections
4.2.2 and 5.3, appendices A.2 to A.5 and A.9). Nothing is measured.
"""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, PreTrainedConfig

from hf_smartspec.goodput.papers.length import expected_length

from .streams import K

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # of table 8
PREFIX = 512  # prompt tokens in table 8
NUM_TOKENS = 128  # L of table 5
NUM_DRAFTERS = 5  # of section 5.3
_BYTES = 2  # of a weight, or a number of keys and values


class Size(NamedTuple):
    """
    Args:
        parameters (`int`): Number of weights.
        kv_numbers (`int`): Numbers of keys and values per token.
    """

    parameters: int
    kv_numbers: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Size":
        """Return the size of a config's model, which is made without memory."""
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            parameters = kind.from_config(config).num_parameters()
        decoder: Any = config.get_text_config(decoder=True)
        heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
        head_dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
        return cls(parameters, 2 * decoder.num_hidden_layers * heads * head_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, in half precision."""
        return _BYTES * self.parameters

    def bytes_at(self, length: float) -> float:
        """Return the bytes that a forward of one token reads: the weights, and keys and values of `length` tokens."""
        return self.num_bytes + _BYTES * self.kv_numbers * length


def _llama(size: int, inner: int, layers: int, heads: int, kv_heads: int | None = None) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=size, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, vocab_size=32000,
    )  # fmt: skip


def paper_pairs() -> dict[str, tuple[PreTrainedConfig, PreTrainedConfig]]:
    """Return target and draft model of the paper's two pairs."""
    return {
        "Vicuna-7B, LLaMA-160M": (_llama(4096, 11008, 32, 32), _llama(768, 3072, 12, 12)),
        "Vicuna-33B, TinyLLaMA-1.1B": (_llama(6656, 17920, 60, 52), _llama(2048, 5632, 22, 32, 4)),
    }


def speedup(alpha: float, k: int, c: float) -> float:
    """Return the expected speed-up, Eq. 1: c is the time of a draft model's forward over that of the target's."""
    return float(expected_length(alpha, k)) / (k * c + 1)


def flops_ratio(target: float, drafter: float, k: int, a: float) -> float:
    """
    Return the target's FLOPs over the drafter's, training included (appendix A.4, from Eq. 6).

    Args:
        target, drafter (`float`): FLOPs of a forward per token, or parameters.
        k (`int`): Proposals of a step.
        a (`float`): Tokens that a step yields.
    """
    return (k + 1) * target / ((k + 3 * a) * drafter)


def bytes_read(target: float, drafter: float, num_tokens: int, a: float, interval: float | None = None) -> float:
    """
    Return the bytes that speculative decoding reads for `num_tokens` tokens (table 5), with an update of the drafter
    after every `interval` tokens, if it learns.
    """
    learning = 0.0 if interval is None else drafter * num_tokens / interval
    return num_tokens / a * target + num_tokens * drafter + learning


def costs(
    target: Size, drafter: Size, alpha: float = 0.28, learnt: float = 0.76, k: int = K, interval: int = 8
) -> dict[str, Any]:
    """
    Return what the tables of the paper have, for one pair.

    Args:
        alpha, learnt (`float`): Acceptance rates without and with learning; by default those of Vicuna-7B on Spider
            (table 1), as in table 5.
        k (`int`): Proposals of a step.
        interval (`int`): I, requests up to an update; table 5 takes it as tokens.
    """
    before, after = (float(expected_length(rate, k)) for rate in (alpha, learnt))
    c = drafter.num_bytes / target.num_bytes  # where reading the weights takes the time
    by_length = {}
    for length in LENGTHS:
        middle = PREFIX + length / 2
        ratio = drafter.bytes_at(middle) / target.bytes_at(middle)
        by_length[str(length)] = [speedup(rate, k, ratio) for rate in ALPHAS]
    return {
        "parameters": [target.parameters, drafter.parameters],
        "bytes": [target.num_bytes, drafter.num_bytes],
        "kv bytes per token": [_BYTES * target.kv_numbers, _BYTES * drafter.kv_numbers],
        "share of one drafter": c,
        "share of several": NUM_DRAFTERS * c,
        "flops ratio": flops_ratio(target.parameters, drafter.parameters, k, after),
        "bytes read": {
            "original": float(NUM_TOKENS * target.num_bytes),
            "speculative": bytes_read(target.num_bytes, drafter.num_bytes, NUM_TOKENS, before),
            "online": bytes_read(target.num_bytes, drafter.num_bytes, NUM_TOKENS, after, interval),
        },
        "speed-up": [speedup(rate, k, c) for rate in ALPHAS],
        "speed-up by length": by_length,
        # Table 9 in FLOPs: answering I requests takes 2 per parameter and token, learning them 6.
        "inference over update": 2 * target.parameters / (6 * drafter.parameters),
        "alphas": [alpha, learnt],
    }
