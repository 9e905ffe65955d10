"""How the target picks a token: logits processors as plain decoding applies them, and noise that can be repeated."""

import copy
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from ..prepare.checks import check_seed

# Look at the scores alone: one call serves rows of different lengths.
_SCORE_ONLY = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.SuppressTokensLogitsProcessor,
)

# Look at one row's own tokens and keep no state: every row can be served by itself, at its own length.
_ROW_ONLY = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)


# Noise of a uniform variate of 52 bits never exceeds this, -log(-log(1 - 2**-53)).
_LARGEST_NOISE = 36.74

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def gumbel_noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """
    Standard Gumbel noise of the given tokens (int64, any shape) at one position of one request, float32.

    A counter-based generator: the noise of (seed, position, token) is the same whenever, wherever and beside whatever
    it is asked for. Token counters pass through the finaliser of SplitMix64 (Steele et al., 2014).
    """
    key = _mix_int(_mix_int(seed) ^ (position + 1))
    if tokens.device.type == "cpu":  # numpy: a dozen small operations are dearer in torch, whose threads meet in each
        uniform = torch.from_numpy(_uniform_numpy(key, tokens.numpy()))
    else:
        uniform = _uniform_torch(key, tokens)
    # In float64, since the upper tail, which decides who wins, is lost where float32 rounds the uniform to 1.
    return -torch.log(-torch.log(uniform)).to(torch.float32)


def _uniform_numpy(key: int, tokens: np.ndarray) -> np.ndarray:
    """
    Uniform variates in the open interval (0, 1): the upper 52 bits of the hash, centred in their cell. With 53 bits the
    centre of the last cell would be rounded to 1, whose noise is infinite.
    """
    counters = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    counters = (counters ^ (counters >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    counters = (counters ^ (counters >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    counters = counters ^ (counters >> np.uint64(31))
    return ((counters >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _uniform_torch(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """The same on any device; torch has no unsigned arithmetic, so shifts are masked."""
    counters = (tokens + 1) * _signed(_GOLDEN) + _signed(key)
    counters = (counters ^ _shift(counters, 30)) * _signed(_MULTIPLIERS[0])
    counters = (counters ^ _shift(counters, 27)) * _signed(_MULTIPLIERS[1])
    counters = counters ^ _shift(counters, 31)
    return (_shift(counters, 12).to(torch.float64) + 0.5) * 2.0**-52


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def add_gumbel_noise(scores: torch.Tensor, seeds: Sequence[int | None], positions: Sequence[int]) -> torch.Tensor:
    """
    Scores `[rows, vocab_size]` plus the noise of each row's seed and position; rows without a seed stay as they are.
    Noise is made only for tokens that can still win: those that the processors left, and whose score, with the largest
    noise there is, exceeds that of the highest score with its own noise.
    """
    scores = scores.clone()
    for line, seed, position in zip(scores, seeds, positions):
        if seed is None:
            continue
        best = line.argmax(keepdim=True)
        bound = line[best] + gumbel_noise(seed, position, best) - _LARGEST_NOISE
        tokens = torch.nonzero((line >= bound) & (line > -torch.inf)).squeeze(1)
        line[tokens] += gumbel_noise(seed, position, tokens)
    return scores


def _mix_int(value: int) -> int:
    """SplitMix64's output function on one Python integer; also how row seeds are derived."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def row_seed(seed: int, row: int) -> int:
    """The seed of row `row` of a batch that was given one seed; row 0 keeps the seed itself."""
    return seed if row == 0 else _mix_int(_mix_int(seed) + row)


def draft_seed(seed: int) -> int:
    """The seed with which a draft samples by itself, when its tokens are verified by rejection."""
    return seed ^ 0x5EED_D4AF


class SeededGumbelLogitsProcessor(LogitsProcessor):
    """
    Adds seeded Gumbel noise to the scores, so that the arg max is a sample (the Gumbel-max trick) that depends on
    nothing but (seed, row, number of generated tokens, token).

    It is the reference for this library's sampling: plain `generate(do_sample=False, logits_processor=[..., this])`
    returns the tokens that `generate(do_sample=True, assistant=..., seed=seed)` returns. Put it last, behind the
    warpers (temperature, top-k, ...), which `do_sample=False` does not add by itself.

    Args:
        seed (`int` or sequence of `int`): One seed for the batch, from which each row derives its own, or one per row.

    It notices the start of a generation by itself (its input is not one token longer than before); use one object per
    `generate` call if you continue a text token by token.
    """

    def __init__(self, seed: int | Sequence[int]):
        check_seed(seed)
        self.seed = [int(value) for value in seed] if isinstance(seed, Sequence) else int(seed)
        self._prompt_length = self._length = -1
        self._is_bound = False

    def seed_of(self, row: int) -> int:
        return row_seed(self.seed, row) if isinstance(self.seed, int) else self.seed[row]

    def for_row(self, row: int, prompt_length: int) -> "SeededGumbelLogitsProcessor":
        """The same noise for one row of the batch on its own, bound to a prompt of `prompt_length` tokens."""
        single = SeededGumbelLogitsProcessor([self.seed_of(row)])
        single._prompt_length, single._is_bound = prompt_length, True
        return single

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        length = input_ids.shape[1]
        if not self._is_bound and length != self._length + 1:
            self._prompt_length = length
        self._length = length
        seeds = [self.seed_of(row) for row in range(len(scores))]
        return add_gumbel_noise(scores, seeds, [length - self._prompt_length] * len(scores))  # type: ignore[return-value]


class PickedRow(Protocol):
    """What a `TokenPicker` reads of a request."""

    index: int  # row of the caller's batch

    @property
    def num_generated(self) -> int: ...

    def padded_ids(self) -> torch.Tensor: ...  # [t], left padding included, on the CPU


class PaddedBatch(Protocol):
    """What a `TokenPicker` reads of the batch."""

    def padded_batch(self, num_generated: int) -> torch.Tensor: ...  # [batch_size, prompt_len + num_generated]


class TokenPicker:
    """
    The target's own choice of token for rows of one `generate` call (DESIGN 3.5 and 3.6). A processor of one's own that
    looks at each row's own tokens and keeps no state may say so by an attribute `keeps_no_state = True`: rows then need
    not wait for one another.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them for the whole batch.
        batch_size, prompt_length (`int`): Of the caller's padded batch.

    Attributes:
        is_known (`bool`): Whether no processor can keep state, so that it does not matter when they are called.
        signature (`tuple`, *optional*): Equal for pickers that do the same to scores, which look at nothing else.
        needs_lockstep (`bool`): True if some processor is of unknown kind in a batch of several rows. It may keep
            state across rows, so rows may be picked for only when all unfinished rows have logits for one length.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int, prompt_length: int):
        self.processors, self.batch_size = processors, batch_size
        known = (*_SCORE_ONLY, *_ROW_ONLY, SeededGumbelLogitsProcessor)
        self.score_only = all(type(processor) in _SCORE_ONLY for processor in processors)
        self.is_known = all(type(item) in known or getattr(item, "keeps_no_state", False) for item in processors)
        self.needs_lockstep = batch_size > 1 and not self.is_known
        self.signature = _signature(processors) if self.score_only else None
        self._rows: list[LogitsProcessorList] = []
        if self.is_known and not self.score_only:
            for row in range(batch_size):
                split = (_for_row(processor, row, prompt_length, batch_size) for processor in processors)
                self._rows.append(LogitsProcessorList(split))

    def process(self, rows: Sequence[PickedRow], logits: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        """
        Processed scores `[len(rows), vocab_size]` for the next token of each row from float32 logits of that shape.
        Processors of unknown kind see the whole batch, as plain decoding would show it to them.
        """
        if not self.processors:
            return logits
        if self.score_only:
            for processor in self.processors:
                logits = processor(None, logits)
            return logits
        if self._rows:
            scored = []
            for row, line in zip(rows, logits):
                ids = row.padded_ids().to(logits.device)
                scored.append(self._rows[row.index](ids[None], line[None].clone()))  # type: ignore[arg-type]
            return torch.cat(scored)
        return self._process_batch(rows, logits, batch)

    def _process_batch(self, rows: Sequence[PickedRow], logits: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
        input_ids = batch.padded_batch(rows[0].num_generated)
        lines = [row.index for row in rows]
        # Finished rows have no logits; plain decoding passes something nobody reads, here it is zeros.
        full = logits.new_zeros(self.batch_size, logits.shape[1])
        full[lines] = logits
        return self.processors(input_ids, full)[lines]  # type: ignore[arg-type]


def _signature(processors: LogitsProcessorList) -> tuple | None:
    """What the processors are and how they are set; None where a setting is more than a number."""
    settings = [(type(processor), *sorted(vars(processor).items())) for processor in processors]
    if all(isinstance(value, bool | int | float) for _, *items in settings for _, value in items):
        return tuple(settings)
    return None


def _for_row(processor: LogitsProcessor, row: int, prompt_length: int, batch_size: int) -> LogitsProcessor:
    """A processor for one row of the batch by itself, from one that serves the whole batch."""
    if isinstance(processor, SeededGumbelLogitsProcessor):
        return processor.for_row(row, prompt_length)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor) and len(ignored) == batch_size:
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]  # type: ignore[attr-defined]
    return processor


def argmax(scores: torch.Tensor) -> list[int]:
    """Arg max of every line of `[rows, vocab_size]`; ties go to the lowest token, as in `torch.argmax`."""
    if scores.device.type == "cpu":
        # numpy's arg max is vectorised, torch's on the CPU is not: 6 times faster for 40 lines of 32,000. A few lines
        # at a time, so that what was converted is still in the cache.
        parts = [scores] if scores.dtype == torch.float32 else scores.split(_LINES)
        return [token for part in parts for token in part.float().numpy().argmax(axis=-1).tolist()]
    return scores.argmax(dim=-1).tolist()


_BLOCK = 128
_LINES = 8


def top_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """
    The `count` best tokens of every line of `[rows, vocab_size]`, best first (all, if there are fewer): `torch.topk`,
    applied to those blocks of the vocabulary only that hold the highest maxima. On a CPU, block maxima are vectorised
    and `topk` is not.
    """
    num_rows, vocab_size = scores.shape
    num_blocks = vocab_size // _BLOCK
    if scores.device.type != "cpu" or count >= num_blocks:
        return scores.topk(min(count, vocab_size), dim=-1).indices
    maxima = scores[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK)).amax(dim=-1)
    blocks = maxima.topk(count, dim=-1).indices
    tokens = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(num_blocks * _BLOCK, vocab_size).expand(num_rows, -1)
    tokens = torch.cat([tokens, rest], dim=1)
    return tokens.gather(1, scores.gather(1, tokens).topk(count, dim=-1).indices)


def score_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of the processors that look at scores alone, which a drafter can apply to its own scores as well."""
    return LogitsProcessorList([processor for processor in processors if type(processor) in _SCORE_ONLY])
