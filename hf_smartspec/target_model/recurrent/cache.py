"""The slot cache of models with recurrent layers: states of rows beside keys and values."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ...cpu.recurrence import Key, Rates, can_convolve, can_recur, has_vectors
from ...device import to_device
from ..layout.rows import CacheRow, RowInput
from .diagonal import scan_levels
from .kept import States
from .scan import Scanned, normalized, path_sums, rates_of, scan, steps_of
from .state_rows import StateRows
from .step import RecurrentStep

_TAIL = 17  # tokens of a row in a step, the draft included, for whose results memory is counted


class StateCache(StateRows):
    """
    The `StateRows` that packed forwards write to, step by step.

    Args:
        num_slots, capacity, most_lines (`int`): See `SlotCache`.
        chunk (`int`): Fed tokens that a recurrence runs at once.

    Attributes:
        tells_prompts (`bool`): Whether states depend on which tokens belong to a prompt.
    """

    tells_prompts = False

    def __init__(self, num_slots: int = 1, capacity: int = 256, most_lines: int | None = None, chunk: int = 64):
        super().__init__(num_slots, capacity, most_lines)
        self.chunk = chunk
        self._transposed: set[Key] = set()  # of states that transformers keeps as `[heads, dv, dk]`
        self._tokens_before: dict[int, int] = {}  # what stands before texts, by the numbers of windows of tokens
        self._open: dict[CacheRow, RecurrentStep] = {}  # steps whose tokens are not in the row's state yet
        self._step: RecurrentStep | None = None
        self._key: Key = 0, 0  # of the state that the model asked for last

    def release(self) -> list[torch.Tensor]:
        self._open, self._step = {}, None
        return super().release()

    def forget(self) -> None:
        super().forget()
        self._open, self._step = {}, None

    @property
    def num_state_bytes(self) -> int:
        """Bytes of the memory of states, and of what steps have left whose accepted paths are not known yet."""
        return (self._num_entries + len(self.kept)) * self.bytes_per_state + self._num_open_bytes

    @property
    def _num_open_bytes(self) -> int:
        return sum(step.num_bytes for step in set(self._open.values()))

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row's states, and of what a step with a draft leaves of it, by the steps that are open now."""
        num_tokens = sum(step.parents.size for step in set(self._open.values()))
        return self.bytes_per_state + _TAIL * self._num_open_bytes // max(num_tokens, 1)

    def export(
        self, rows: Sequence[CacheRow], columns: Sequence[torch.Tensor], total_length: int, cache: Cache
    ) -> Cache:
        self._settle(rows)
        entries = [self._entries[row] for row in rows]
        for (layer, number), memory in self._windows.items():
            if not isinstance(layer, int):
                continue
            inputs = memory[entries].mT
            if number in self._tokens_before:  # those of n-grams
                inputs = inputs[:, 0] + self._tokens_before[number]
            elif number == 0:
                inputs = torch.nn.functional.pad(inputs, (1, 0))  # one more, which is not read
            cache.update_conv_state(inputs, layer, state_idx=number, conv_kernel_size=inputs.shape[-1])
        super().export(rows, columns, total_length, cache)
        for (layer, number), memory in self._states.items():
            if not isinstance(layer, int):
                continue
            is_transposed = (layer, number) in self._transposed
            states = memory[entries].mT if is_transposed else memory[entries]
            if hasattr(cache, "set_linear_cache"):  # MiniMax, which keeps states in the dtype of keys
                keys: Any = cache.layers[-1].keys  # type: ignore[union-attr]
                cache.set_linear_cache(layer, states.to(keys.dtype))
            else:
                cache.update_recurrent_state(states, layer, state_idx=number)
        return cache

    # One step

    def begin(self, rows: Sequence[RowInput], device: torch.device) -> None:
        """
        Plan a forward of these rows. Tokens fed before, of which no draft was verified, enter the states first.

        Raises:
            NotImplementedError: if only some of the rows' drafts were begun in the same earlier forward.
        """
        before = {self._open.get(item.row) if item.first_node else None for item in rows}
        if len(before) > 1:
            raise NotImplementedError("Drafts over recurrent layers that grow by several forwards grow together.")
        (step,) = before
        if step is None:
            self._settle([item.row for item in rows])
        else:
            self._spread(step)
        entries = [self._entries[item.row] for item in rows]
        self._step = RecurrentStep(rows, entries, self.chunk, device, step)
        self._open |= dict.fromkeys(self._step.rows, self._step)

    def commit(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        self._fold(rows, paths)
        super().commit(rows, paths)

    def _settle(self, rows: Sequence[CacheRow]) -> None:
        left = [row for row in rows if row in self._open]
        self._fold(left, [()] * len(left))

    def _fold(self, rows: Sequence[CacheRow], paths: Sequence[Sequence[int]]) -> None:
        """Bring the states of rows to the end of their paths."""
        by_step: dict[RecurrentStep, list[tuple[CacheRow, Sequence[int]]]] = {}
        for row, path in zip(rows, paths):
            if (step := self._close(row)) is not None:
                by_step.setdefault(step, []).append((row, path))
                if row.length - 1 in row.marks:
                    self._keep(row, row.length - 1, partial(self._before_last, step, row))
        for step, items in by_step.items():
            if step.is_stored:
                continue
            numbers, ends = step.ends_of([row for row, _ in items], [path for _, path in items])
            is_moved = ends >= 0
            if is_moved.any():
                self._advance(step, numbers[is_moved], ends[is_moved])

    def _close(self, row: CacheRow) -> RecurrentStep | None:
        """Take a row out of its step, if any, and return this. Without open rows, no step's large arrays are kept."""
        step = self._open.pop(row, None)
        if not self._open:
            self._step = None
        return step

    def _before_last(self, step: RecurrentStep, row: CacheRow) -> States:
        """Return a row's states before the last fed token of a step."""
        number, before = step.rows[row], self._copied(row)
        end = step.fed_in_tail[number] - 2
        if end < 0:
            return before
        try:
            self._advance(step, np.array([number]), np.array([end]))
            return self._copied(row)
        finally:
            self._load(row, before)

    def _advance(self, step: RecurrentStep, numbers: np.ndarray, ends: np.ndarray) -> None:
        """Compute the states of some rows of a step after the tokens `ends` of their tails."""
        if step.short is not None:
            step.short.store(numbers, ends, self._windows, self._states)
        if not step.windows and not step.scanned:
            return
        is_whole = len(numbers) == len(step.rows) and bool((numbers == np.arange(len(numbers))).all())
        own, last, entries = to_device(np.stack([numbers, ends, step.entries[numbers]]), step.device)
        at = step.at if is_whole else entries
        for key, windows in step.windows.items():
            self._windows[key][at] = windows[own, last]
        path = step.sees[own, 0, last]
        for key, scanned in step.scanned.items():
            if not is_whole:
                scanned = scanned.of(own)
            self._states[key][at] = scanned.state_after(self._states[key][at], last, path)

    def _spread(self, step: RecurrentStep) -> None:
        """Lay out what compiled code has left of a step as torch does, for a step whose tails begin with its tails."""
        if step.short is None:
            return
        ended = [row for row, number in step.rows.items() if step.short.rows[number, 3] >= 0]  # stored already
        self._settle([row for row in ended if self._open.get(row) is step])
        if step.short.fill is not None:
            step.short.fill()
        for key, inputs in step.short.inputs.items():
            windows = self._windows[key][step.at]
            places = torch.from_numpy(step.short.last_inputs(windows.shape[1]))
            step.windows[key] = torch.cat([inputs, windows.flatten(0, 1)])[places]
        tails = torch.from_numpy(step.short.last_inputs(1)[..., 0])
        for key, (keys, eps, writes, decays, rates) in step.short.written.items():
            keys = normalized(keys, eps).repeat_interleave(writes.shape[1] // keys.shape[1], dim=1)
            own, written, decay = [item[tails].transpose(1, 2) for item in (keys, writes, rates_of(decays, rates))]
            step.scanned[key] = Scanned(own, written, decay, path_sums(step.sees, decay))
        step.short.forget()

    # What transformers' layers call

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that layers run their form for several tokens; `convolve` reads the state."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that layers run their form for several tokens; `scan` reads the state."""
        self._key = layer_idx, state_idx

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Return the inputs of a convolution, which is run next."""
        self._key = layer_idx, state_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Ignore the state: that of the accepted path is computed in `commit`."""
        return recurrent_states

    def remember(self) -> Callable[[], None]:
        """Return a function that brings all states back to the present ones, and the step to its beginning."""
        memories = self._windows, self._states
        saved = [{key: memory.clone() for key, memory in own.items()} for own in memories]

        def restore() -> None:
            for own, before in zip((self._windows, self._states), saved):
                for key, memory in own.items():
                    memory.copy_(before[key]) if key in before else memory.zero_()
            if self.step.short is not None:
                self.step.short.forget()

        return restore

    @property
    def step(self) -> RecurrentStep:
        """The step of the present forward."""
        assert self._step is not None, "states are read by a packed forward only"
        return self._step

    # What the replaced functions call

    def enter(self, layer: Any, number: int = 0) -> None:
        """Let what is run next be a layer's, given by its number; by itself, if it keeps its states in itself."""
        self._key = layer, number

    def convolve(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """
        Compute a causal convolution along every token's ancestors.

        Args:
            inputs (`torch.Tensor` of shape `[N, channels]`), weight (`torch.Tensor` of shape `[channels, width]`).
            activation (`str`, *optional*): Name of a function of the outputs.
            dtype (`torch.dtype`, *optional*): Dtype of the outputs; by default, the weight's.

        Returns:
            `torch.Tensor` of shape `[N, channels]`, computed in float32; rounded before the activation, too.
        """
        step, width, dtype = self.step, weight.shape[1], dtype or weight.dtype
        memory = self.windows(self._key, inputs, width, inputs.shape[1])
        is_silu = activation in ("silu", "swish")
        is_known = dtype is torch.float32 and (is_silu or activation is None)
        if step.short is not None and is_known and can_convolve(inputs, weight, bias):
            key = self._key
            return step.run_short(lambda own, x: own.convolve(key, x, memory, weight, bias, is_silu), inputs)
        output = self.last_inputs(inputs, width).float().mul_(weight.T.float()).sum(1)  # in place, for its size
        if bias is not None:
            output = output + bias.float()
        output = output.to(dtype)
        return output if activation is None else ACT2FN[activation](output)

    def last_inputs(self, inputs: torch.Tensor, width: int) -> torch.Tensor:
        """Return the inputs `[N, channels]` of every token after its ancestors', `[N, width, channels]`."""
        inputs, sources = self._keep_windows(inputs, width)
        return inputs[sources]

    def _keep_windows(self, inputs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the last inputs after every token of the tails; return inputs and windows, and `step.sources`."""
        step = self.step
        windows, known = self.windows(self._key, inputs, width, inputs.shape[1])[step.at], None
        if step.before is not None:
            known = step.before.windows[self._key][step.own]
            windows = torch.cat([windows, known.flatten(0, 1)])
        inputs = torch.cat([inputs, windows.flatten(0, 1)])
        sources = step.sources(width, len(windows))
        after = inputs[step.tails(sources)[..., 1:]]
        step.windows[self._key] = after if known is None else torch.cat([known, after], dim=1)
        return inputs, sources

    def last_tokens(self, tokens: torch.Tensor, width: int, before: int) -> torch.Tensor:
        """Return every token of `[N]` after its nearest ancestors, `[N, width]`; `before` stands before a text."""
        self._tokens_before[self._key[1]] = before
        return self.last_inputs(tokens[:, None] - before, width)[..., 0] + before  # windows begin with zeros

    def is_prompt(self) -> torch.Tensor:
        """Return for every token of the step whether it belongs to a prompt, `[N]`, bool."""
        self.tells_prompts = True
        return self.step.is_prompt()

    def scan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        is_transposed: bool = False,
        scale: float = 1.0,
        eps: float = 0.0,
        rates: Rates | None = None,
    ) -> torch.Tensor:
        """
        Compute a recurrence along every token's ancestors: `scan.scan`, for all rows.

        Args:
            query, key (`torch.Tensor` of shape `[N, heads / groups, dk]`), value (`torch.Tensor` of shape `[N, heads,
                dv]`), decay (`torch.Tensor` of shape `[N, heads]` or `[N, heads, dk]`), beta (`torch.Tensor` of shape
                `[N, heads]`, *optional*): Inputs in float32; where `rates` are given, decays and betas may be in their
                dtype. Neighbouring heads share queries and keys.
            is_transposed (`bool`): Whether transformers' caches have these states as `[heads, dv, dk]`.
            scale (`float`), eps (`float`): Factor of queries; where `eps` is not 0, queries and keys are normalized.
            rates (pair of `torch.Tensor`, *optional*): See `rates_of`; betas are then sigmoids of those given, and
                values without betas are multiplied by `steps_of`.

        Returns:
            `torch.Tensor` of shape `[N, heads, dv]`.
        """
        if is_transposed:
            self._transposed.add(self._key)
        step, heads, size, value_size = self.step, value.shape[1], key.shape[2], value.shape[2]
        if step.short is not None:
            query, key, value = (item if has_vectors(item) else item.contiguous() for item in (query, key, value))
            if can_recur(query, key, value, decay, beta, rates):
                rest = self.states(self._key, value, heads, size, value_size), scale, eps, rates
                layer, given = self._key, (query, key, value, decay, beta)
                return step.run_short(lambda own, *inputs: own.recur(layer, *inputs, *rest), *given)
        query, key = [normalized(item, eps).repeat_interleave(heads // key.shape[1], dim=1) for item in (query, key)]
        if rates is not None and beta is None:
            value = value * steps_of(decay, rates)[..., None]
        elif rates is not None and beta is not None:
            beta = beta.float().sigmoid()

        def run(state: torch.Tensor, is_piece: bool, before: Any, query, key, value, decay, beta):  # type: ignore
            sees = step.causal if is_piece else step.sees
            return scan(query, key, value, decay, beta, state, sees, before)

        memory = self.states(self._key, value, heads, size, value_size)
        return step.scan(run, self._key, memory, query * scale, key, value, rates_of(decay, rates), beta)

    def scan_diagonal(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        rates: torch.Tensor,
    ) -> torch.Tensor:
        """
        Compute a diagonal recurrence along every token's ancestors: `diagonal.scan_levels`, for all rows.

        Args:
            query, key (`torch.Tensor` of shape `[N, n]`): C, in the dtype in which states are read, and B.
            value, decay (`torch.Tensor` of shape `[N, channels]`), rates (`torch.Tensor` of shape `[channels, n]`): x,
                Δ and A, in float32 as the keys.

        Returns:
            `torch.Tensor` of shape `[N, channels]`.
        """
        step = self.step

        def run(state: torch.Tensor, is_piece: bool, before: Any, query, key, value, decay):  # type: ignore
            levels = step.levels_of_pieces(len(state)) if is_piece else step.levels
            output, trail = scan_levels(query, key, value, decay, rates, state, levels, before)
            return output, trail if is_piece else trail._replace(last=None)  # no states are kept beside the rows' own

        return step.scan(run, self._key, self.states(self._key, value, *rates.shape), query, key, value, decay)
