"""
Attention of a few tokens on a CPU. torch's attention computes matrix products for every head of every row, which do not
pay for few queries.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from .few_tokens import ANY, has_kernels, most_tokens
from .kernels.attend import MOST_AS_THEY_LIE, scratch_size
from .kernels.multiply import CACHE
from .kernels.program import ATTEND
from .kernels.runs import divide, extent
from .kernels.vectors import num_lanes
from .program import DTYPES, run_operator
from .tensor_checks import is_plain, is_vector

NO_TREE = 2**40  # a line after all others
_FEW = 64  # tokens of a row, where torch multiplies those of prompts
_NO_PREFIXES = np.zeros(0, np.int64)
_CAP = 0.5  # of the check
_TOGETHER = 4  # heads that read shared keys side by side
_SMALL = 2**15  # numbers of keys that one thread has read before a second one has begun


@dataclass(frozen=True, eq=False)
class SeenLines:
    """
    Lines of keys and values that tokens attend to.

    Args:
        firsts, counts (`np.ndarray` of shape `[N]`, int64): The first line that each token attends to, and the number
            of lines from that one to the token's own, at least one.
        runs (`np.ndarray` of shape `[runs + 1]`, int64): The first token of each run, and the end of the last one. A
            run is up to `MOST_TOKENS` tokens that attend to lines of one row and are computed together.
        nodes (`np.ndarray` of shape `[1 + words, N]`, int64, *optional*): Lines and bits: from its line on, each token
            attends only to lines with a set bit, of 64 lines in each word. A token that attends to all has `NO_TREE`.
        prefixes (`np.ndarray` of shape `[2, N]`, int64, *optional*): First line and number of the lines that each token
            attends to before these: a prefix that rows share. Tokens with one attend to all lines of their row.
    """

    firsts: np.ndarray
    counts: np.ndarray
    runs: np.ndarray
    nodes: np.ndarray | None = None
    prefixes: np.ndarray | None = None
    # Computed once, not in every layer:
    addresses: list[int] = field(init=False)
    most_tokens: int = field(init=False)
    num_seen: int = field(init=False)
    most_lines: int = field(init=False)

    def __post_init__(self) -> None:
        nodes = (None, None) if self.nodes is None else (self.nodes[0], self.nodes[1:])
        distance = 0 if self.nodes is None else self.nodes.strides[0] // self.nodes.itemsize
        prefixes = (None, None) if self.prefixes is None else self.prefixes
        arrays = self.runs, self.firsts, self.counts, *nodes, *prefixes
        own = vars(self)  # fields of a frozen class cannot be assigned
        addresses = [0 if array is None else array.ctypes.data for array in arrays]
        own["addresses"] = [*addresses[:5], distance, *addresses[5:]]
        extents = extent(self.runs, self.firsts, self.counts, _NO_PREFIXES if self.prefixes is None else prefixes[1])
        own["most_tokens"], own["num_seen"], own["most_lines"] = extents


def most_width(dtype: torch.dtype) -> int:
    """
    Return the tokens of a row up to which compiled code attends: any number where it multiplies any, so that the way in
    which a prompt is cut does not change what is computed for a token, and with AVX2, where torch's is no faster
    (measured on an AMD).
    """
    return ANY if most_tokens(dtype) == ANY or num_lanes() == 8 else _FEW


def can_attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> bool:
    """
    Return whether compiled code computes attention of queries `[N, heads, head_dim]` to keys and values `[lines,
    kv_heads, head_dim]` as they lie in memory, also with `sinks`.
    """
    return (
        is_plain(queries)
        and (scale is None or scale > 0)
        and queries.dtype is keys.dtype is values.dtype
        and queries.shape[2] == keys.shape[2] == values.shape[2]
        and not queries.shape[1] % keys.shape[1]
        and not queries.shape[2] % 16
        and keys.is_contiguous()
        and values.is_contiguous()
        and (sinks is None or (sinks.dtype is queries.dtype and is_vector(sinks, queries.shape[1])))
        and not (
            torch.is_grad_enabled()
            and any([item.requires_grad for item in (queries, keys, values, sinks) if item is not None])
        )
        and has_attention(queries.dtype)
    )


def few_token_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lines: SeenLines,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """
    Compute attention of tokens, each over neighbouring lines, for arguments that pass `can_attend`.

    Args:
        queries (`torch.Tensor` of shape `[N, heads, head_dim]`): Queries; neighbouring heads share a key/value head.
        keys, values (`torch.Tensor` of shape `[lines, kv_heads, head_dim]`): Keys and values of all rows.
        lines (`SeenLines`): Lines that the tokens attend to.
        scale (`float`, *optional*): Factor of scores, above 0; `head_dim ** -0.5` where not given.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): Logits that join the scores of each head in the softmax,
            and have no value.
        softcap (`float`, *optional*): Bound within which scaled scores are squashed (Gemma 2).

    Returns:
        `torch.Tensor` of shape `[N, heads, head_dim]`. A token's result does not depend on the others.
    """
    queries = queries.contiguous()
    heads, size = queries.shape[1:]
    kv_heads, outputs, num_runs = keys.shape[1], torch.empty_like(queries), len(lines.runs) - 1
    num_threads = 1 if lines.num_seen * kv_heads * size <= _SMALL else torch.get_num_threads()
    parts, own = division(lines, heads, kv_heads, size, num_threads)
    scratch = queries.new_empty(num_threads * own, dtype=torch.float32)
    runs, *others = lines.addresses
    run_operator(
        queries.dtype, ATTEND, num_threads, num_runs, runs, parts, kv_heads, heads // kv_heads, size, *others,
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), outputs.data_ptr(), 0, 0, 0,
        0 if sinks is None else sinks.data_ptr(), 0, 0, 0, scratch.data_ptr(), own,
        size**-0.5 if scale is None else scale, softcap or 0.0,
    )  # fmt: skip
    return outputs


def latent_attention(
    queries: torch.Tensor,
    turned: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    lines: SeenLines,
    scale: float,
) -> torch.Tensor:
    """
    Compute attention of tokens to latents, which are keys and values of all heads, beside rotated keys.

    Args:
        queries, turned (`torch.Tensor` of shape `[heads, N, rank]` and `[heads, N, dim]`): Queries of latents and of
            rotated keys, contiguous, as all of these.
        latents, rotated (`torch.Tensor` of shape `[lines, 1, rank]` and `[lines, 1, dim]`): Of all rows; multiples of
            16 numbers.
        lines (`SeenLines`): Lines that the tokens attend to.
        scale (`float`): Factor of scores, above 0.

    Returns:
        `torch.Tensor` of shape `[heads, N, rank]`. A token's result does not depend on the others.
    """
    heads, room, rank = queries.shape
    kv_heads, dim, outputs = parts_of_heads(heads), rotated.shape[2], torch.empty_like(queries)
    num_threads = 1 if lines.num_seen * kv_heads * rank <= _SMALL else torch.get_num_threads()
    parts, own = division(lines, heads, kv_heads, rank, num_threads, dim)
    scratch = queries.new_empty(num_threads * own, dtype=torch.float32)
    runs, *others = lines.addresses
    run_operator(
        queries.dtype, ATTEND, num_threads, len(lines.runs) - 1, runs, parts, kv_heads, heads // kv_heads, rank,
        *others, queries.data_ptr(), latents.data_ptr(), rotated.data_ptr(), outputs.data_ptr(), 0, 0, 0, 0, room, dim,
        turned.data_ptr(), scratch.data_ptr(), own, scale, 0.0,
    )  # fmt: skip
    return outputs


def can_attend_to_latents(*tensors: torch.Tensor) -> bool:
    """Return whether compiled code computes `latent_attention` of these queries and keys as they lie in memory."""
    dtype = tensors[0].dtype
    return (
        all(is_plain(item) and item.dtype is dtype and not item.shape[2] % 16 for item in tensors)
        and all(item.is_contiguous() for item in tensors)
        and not (torch.is_grad_enabled() and any(item.requires_grad for item in tensors))
        and has_attention(dtype)
    )


def parts_of_heads(heads: int) -> int:
    """Return the parts into which heads that share all keys are divided, for several threads, `_TOGETHER` in each."""
    return heads // _TOGETHER if not heads % _TOGETHER else 1


def division(
    lines: SeenLines, heads: int, kv_heads: int, size: int, num_threads: int, turned_size: int = 0
) -> tuple[int, int]:
    """
    Return the parts into which the key/value heads of a run are divided, and the float32 numbers of scratch memory that
    a thread needs.
    """
    parts = min(-(-2 * num_threads // (len(lines.runs) - 1)), kv_heads) if num_threads > 1 else 1
    if lines.prefixes is not None:  # a prefix is read for one head of all rows, then for the next
        parts = kv_heads
    queries = lines.most_tokens * (heads // kv_heads)  # of a key/value head
    if lines.most_tokens > 1 and queries > MOST_AS_THEY_LIE:  # computing takes longest, with scores in the cache
        parts = max(parts, -(-kv_heads // max(1, CACHE // (queries * lines.most_lines))))
    return parts, scratch_size(-(-kv_heads // parts) * queries, size, lines.most_lines, turned_size)


def runs_of(rows: np.ndarray) -> np.ndarray:
    """
    Return `SeenLines.runs` for tokens that attend to lines of these rows (`[N]`, grouped by row). Runs of a row differ
    in length by one token at most.
    """
    runs = np.empty(len(rows) + 1, np.int64)
    return runs[: divide(rows, runs) + 1]


@cache
def has_attention(dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for this CPU, and its results are right."""
    if dtype not in DTYPES or not has_kernels(dtype):  # the latter logs why
        return False
    try:
        generator = torch.Generator().manual_seed(0)
        shapes = (6, 4, 80), (70, 2, 80), (70, 2, 80)
        queries, keys, values = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        counts, others = np.array([70, 51, 67, 68, 69, 70]), [NO_TREE] * 5
        lines = SeenLines(
            np.array([0, 3, 0, 0, 0, 0]), counts, np.array([0, 2, 6]), np.array([[67, *others], [0b101, *[-1] * 5]])
        )
        found = few_token_attention(queries, keys, values, lines)
        seen = [range(first, first + count) for first, count in zip(lines.firsts, counts)]
        sees = torch.tensor([[line in own for line in range(70)] for own in seen], device="cpu")
        sees[0, 68] = False
        q, k, v = (item.double().transpose(0, 1) for item in (queries, keys, values))
        expected = scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(0, 1)
        scores = torch.tanh(q @ k.repeat_interleave(2, 0).mT * 80**-0.5 / _CAP) * _CAP
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        capped = (weights @ v.repeat_interleave(2, 0)).transpose(0, 1)
        sinks = torch.randn(4, generator=generator, device="cpu")
        scores = (q @ k.repeat_interleave(2, 0).mT * 80**-0.5).masked_fill(~sees, -torch.inf)
        both = torch.cat([scores, sinks.double()[:, None, None].expand(4, 6, 1)], -1).softmax(-1)
        drained = (both[..., :-1] @ v.repeat_interleave(2, 0)).transpose(0, 1)
        rtol = 1e-5 if dtype is torch.float32 else 2e-2
        pairs = (
            (found, expected),
            (few_token_attention(queries, keys, values, lines, softcap=_CAP), capped),
            (few_token_attention(queries, keys, values, lines, sinks=sinks.to(dtype)), drained),
        )
        return all(
            torch.allclose(own.double(), right, rtol=rtol, atol=rtol * float(right.abs().max())) for own, right in pairs
        )
    except Exception:  # compilers raise errors of many types
        return False
