"""Recurrent layers of a few tokens on a CPU: each in one call, where torch makes dozens."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from .few_tokens import has_kernels
from .kernels.program import CONVOLVE, HEADER, RECUR
from .kernels.recur import most_states, scratch_size
from .program import Program, column, run_operator
from .tensor_checks import is_plain, is_vector

_SMALL = 2**15  # numbers that one thread has read before a second one has begun
_WIDTHS = range(2, 17)
_LAYOUT = [column(CONVOLVE, name) for name in ("num_rows", "tail", "rows", "parents")]  # the same in both operators
_CHECKED = 5  # tokens of the check
Key = tuple[Any, int]  # layer, by its number where transformers' cache has its states, and number of the state in it
Rates = tuple[torch.Tensor, torch.Tensor]
Written = tuple[torch.Tensor, float, torch.Tensor, torch.Tensor, Rates | None]


class ShortTails:
    """
    Rows of a few tokens, with their draft trees, whose recurrent layers are run one after the other.

    Args:
        rows (`np.ndarray` of shape `[R, 4]`, int64): For each row its first token, the number of its tokens, the entry
            of its state, and the token of the row after which its state is stored at once; -1 if none is.
        parents (`np.ndarray` of shape `[R, T]`, int64): The parent of each token in its row, before its children; -1
            for those without.

    Attributes:
        operators (dict): What `store` runs, by code and layer: rows of a `Program`.
        inputs (dict), written (dict): By layer, what these read: inputs of convolutions; keys, their `eps`, what is
            written, and decays, with their `rates`.
        dtype (`torch.dtype`): Dtype of these inputs, of decays, of rates and of windows, which hold the last inputs;
            all other numbers, states among them, are float32.
        most_states (`int`): The most states of a row that recurrences need at once.
        num_bytes (`int`): Bytes of these for all tokens, or what they would take if no state were stored at once.
        stores_all (`bool`): Whether all states are stored at once: then these stay empty.
        fill (`Callable`, *optional*): Fills `inputs` and `written`, if they are not filled yet.
    """

    def __init__(self, rows: np.ndarray, parents: np.ndarray):
        self.rows, self.parents = rows, parents
        self.layout = len(rows), parents.shape[1], rows.ctypes.data, parents.ctypes.data
        self.stores_all = bool((rows[:, 3] >= 0).all())
        self.num_threads, self.most_states = torch.get_num_threads(), most_states(parents)
        self.inputs: dict[Key, torch.Tensor] = {}
        self.written: dict[Key, Written] = {}
        self.operators: dict[tuple[int, Key], np.ndarray] = {}  # codes and fields, as in `Program.rows`
        self.dtype = torch.float32
        self.num_bytes = 0
        self.held: list[torch.Tensor] = []  # memory that operators read
        self._scratch = torch.empty(0, device="cpu")
        self.fill: Callable[[], None] | None = None

    @property
    def is_stored(self) -> bool:
        """Return whether `store` has nothing to do."""
        return not self.operators

    def convolve(
        self,
        key: Key,
        inputs: torch.Tensor,
        windows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_silu: bool,
    ) -> torch.Tensor:
        """
        Return causal convolutions `[N, channels]` in float32 along every token's ancestors, for arguments that pass
        `can_convolve`.

        Args:
            key (tuple): The layer.
            inputs (`torch.Tensor` of shape `[N, channels]`), weight (`torch.Tensor` of shape `[channels, width]`):
                Inputs.
            windows (`torch.Tensor` of shape `[entries, width - 1, channels]`): The last inputs of all entries.
            is_silu (`bool`): Whether SiLU is applied.
        """
        (channels, width), outputs = weight.shape, inputs.new_empty(inputs.shape, dtype=torch.float32)
        fields = (
            channels, width, is_silu, inputs.stride(0), channels, inputs.data_ptr(), windows.data_ptr(),
            weight.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs.data_ptr(),
        )  # fmt: skip
        self.num_bytes += outputs.nbytes
        num_threads = self.num_threads if inputs.numel() * width > _SMALL else 1
        self._note(
            inputs.dtype, CONVOLVE, key, run_operator(inputs.dtype, CONVOLVE, num_threads, *self.layout, *fields)
        )
        if not self.stores_all:
            self.inputs[key] = inputs
        return outputs

    def recur(
        self,
        key: Key,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decays: torch.Tensor,
        betas: torch.Tensor | None,
        states: torch.Tensor,
        scale: float = 1.0,
        eps: float = 0.0,
        rates: Rates | None = None,
    ) -> torch.Tensor:
        """
        Return the outputs `[N, heads, dv]` of a recurrence along every token's ancestors, for arguments that pass
        `can_recur`.

        Args:
            key (tuple): The layer.
            queries, keys (`torch.Tensor` of shape `[N, heads / groups, dk]`), values (`torch.Tensor` of shape `[N,
                heads, dv]`), decays, betas (`torch.Tensor` of shape `[N, heads]`): Inputs; without `betas`, values are
                added as they are.
            states (`torch.Tensor` of shape `[entries, heads, dk, dv]`): States of all entries.
            scale (`float`), eps (`float`): Factor of queries; where `eps` is not 0, queries and keys are normalized.
            rates (pair of `torch.Tensor` of shape `[heads]`, *optional*): A and b where decays are `-exp(A) softplus(x
                + b)` of the given x, and betas are sigmoids of the given ones; without these, values are multiplied by
                `softplus(x + b)`.
        """
        heads, size, value_size = states.shape[1:]
        number = scratch_size(self.parents.shape[1], self.most_states, size, value_size)
        outputs, writes = (values.new_empty(values.shape) for _ in range(2))
        if self._scratch.numel() < self.num_threads * number:  # what is held is read by `store`
            self._scratch = outputs.new_empty(self.num_threads * number)
            self.held.append(self._scratch)
        logs, biases = (0, 0) if rates is None else [item.data_ptr() for item in rates]
        fields = (
            heads, heads // keys.shape[1], size, value_size, queries.data_ptr(), keys.data_ptr(), values.data_ptr(),
            queries.stride(0), keys.stride(0), values.stride(0), decays.data_ptr(), decays.stride(0),
            0 if betas is None else betas.data_ptr(), 0 if betas is None else betas.stride(0), logs, biases,
            betas is not None, states.data_ptr(), writes.data_ptr(), outputs.data_ptr(),
            self._scratch.data_ptr(), number, scale, eps,
        )  # fmt: skip
        # Keys are mostly a view of the convolution's outputs, which then stay.
        self.num_bytes += keys.untyped_storage().nbytes() + writes.nbytes + decays.nbytes
        num_threads = self.num_threads if len(self.rows) * states[0].numel() > _SMALL else 1
        self._note(decays.dtype, RECUR, key, run_operator(decays.dtype, RECUR, num_threads, *self.layout, *fields))
        if not self.stores_all:
            self.written[key] = keys, eps, writes, decays, rates
        return outputs

    def _note(self, dtype: torch.dtype, code: int, key: Key, program: Any) -> None:
        if not self.stores_all:
            assert not self.operators or dtype is self.dtype, "layers of one kind"
            self.dtype = dtype
            self.operators[code, key] = np.frombuffer(program, np.int64)[HEADER:]

    def last_inputs(self, num: int) -> np.ndarray:
        """
        Return the places of each token's last `num` inputs, its own included, `[R, T, num]`: among those of all tokens,
        followed by windows of as many inputs for each row. Padding has those of the row's last token.
        """
        first, size = self.rows[:, :1], self.rows[:, 1:2]
        before = np.arange(1, len(self.rows) + 1)[:, None] * num + int(self.rows[:, 1].sum())
        token, found = np.minimum(np.arange(self.parents.shape[1]), size - 1), []
        for _ in range(num):
            found.append(np.where(token < 0, before + token, first + token))
            token = np.where(token < 0, token - 1, np.take_along_axis(self.parents, np.maximum(token, 0), axis=1))
        return np.stack(found[::-1], axis=2)

    def forget(self) -> None:
        """Drop what `store` reads."""
        for item in (self.inputs, self.written, self.operators, self.held):
            item.clear()
        self.num_bytes, self.fill, self._scratch = 0, None, torch.empty(0, device="cpu")

    def store(
        self,
        numbers: np.ndarray,
        ends: np.ndarray,
        windows: Mapping[Key, torch.Tensor],
        states: Mapping[Key, torch.Tensor],
    ) -> None:
        """
        Store states of some rows, given by `numbers`, after the tokens `ends` of their paths, in all layers that have
        been run; those that were stored at once stay.
        """
        is_left = self.rows[numbers, 3] < 0
        rows, parents = self.rows[numbers[is_left]], self.parents[numbers[is_left]]
        if not len(rows) or not self.operators:
            return
        rows[:, 3] = ends[is_left]
        program = Program(self.dtype, [(code, {}) for code, _ in self.operators])
        for own, fields in zip(program.rows, self.operators.values()):
            own[: len(fields)] = fields
        program.rows[:, _LAYOUT] = len(rows), parents.shape[1], rows.ctypes.data, parents.ctypes.data
        # The memory of states may have grown meanwhile.
        for code, name, memories in ((CONVOLVE, "windows", windows), (RECUR, "states", states)):
            places = [number for number, (own, _) in enumerate(self.operators) if own == code]
            addresses = [memories[key].data_ptr() for own, key in self.operators if own == code]
            program.rows[places, column(code, "outputs")] = 0
            program.rows[places, column(code, name)] = addresses
        program.run(self.num_threads)


def can_convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether compiled code computes `ShortTails.convolve`, and can read the tensors as they lie."""
    dtype = inputs.dtype
    return (
        _is_plain(inputs, dtype)
        and inputs.stride(1) == 1
        and _is_plain(weight, dtype)
        and weight.is_contiguous()
        and weight.shape[1] in _WIDTHS
        and (bias is None or (bias.dtype is dtype and is_vector(bias, len(weight))))
        and has_kernels(dtype)
        and has_recurrence()
    )


def can_recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    rates: Rates | None = None,
) -> bool:
    """Return whether compiled code computes `ShortTails.recur`, and can read the tensors as they lie."""
    return (
        decay.dim() == 2
        and all(_is_plain(item, torch.float32) for item in (query, key, value))
        and all(item is None or (_is_plain(item, decay.dtype) and item.stride(1) == 1) for item in (decay, beta))
        and (rates is None or all(item.dtype is decay.dtype and is_vector(item, decay.shape[1]) for item in rates))
        and (rates is not None or decay.dtype is torch.float32)
        and all(has_vectors(item) and not item.shape[2] % 16 for item in (query, key, value))
        and has_kernels(decay.dtype)
        and has_recurrence()
    )


def has_vectors(item: torch.Tensor) -> bool:
    """Return whether the heads of each token, `[N, heads, size]`, lie side by side."""
    return item.stride()[1:] == (item.shape[2], 1)


def _is_plain(item: torch.Tensor, dtype: torch.dtype) -> bool:
    is_own = is_plain(item) or (type(item) is torch.nn.Parameter and item.is_cpu)
    return is_own and item.dtype is dtype and not (torch.is_grad_enabled() and item.requires_grad)


@cache
def has_recurrence() -> bool:
    """Return whether there is compiled code for this CPU, and its results are right."""
    if not has_kernels(torch.float32):  # which logs why
        return False
    try:
        # Compiled code writes float32, whatever torch's default dtype is.
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        given = {"generator": torch.Generator().manual_seed(0), **kind}
        query, key, value = torch.randn(3, _CHECKED, 1, 16, **given)
        decay, beta = -torch.rand(_CHECKED, 1, **given), torch.rand(_CHECKED, 1, **given)
        tails = ShortTails(np.array([[0, _CHECKED, 0, _CHECKED - 1]]), np.arange(-1, _CHECKED - 1)[None])
        states = torch.zeros(1, 1, 16, 16, **kind)
        state, windows, weight = states.double(), torch.zeros(1, 3, 16, **kind), torch.rand(16, 4, **given)
        found = tails.recur((0, 0), query, key, value, decay, beta, states)
        convolved = tails.convolve((0, 0), value[:, 0], windows, weight, None, False)
        padded = torch.cat([torch.zeros(3, 16, **kind), value[:, 0]])
        expected = torch.stack([padded[place : place + _CHECKED] * weight[:, place] for place in range(4)]).sum(0)
        is_right = torch.allclose(convolved, expected, atol=1e-5) and torch.equal(windows[0], value[2:, 0])
        for token in range(_CHECKED):
            q, k, v, g, b = (item[token].double() for item in (query, key, value, decay, beta))
            state = state * g.exp()[..., None, None]
            state = state + k[..., None] * (b[..., None] * (v - (k[..., None, :] @ state)[0, :, 0]))[..., None, :]
            is_right &= torch.allclose(found[token].double(), (q[..., None, :] @ state)[0, :, 0], atol=1e-5, rtol=1e-5)
        return is_right and torch.allclose(states.double(), state, atol=1e-5, rtol=1e-5)
    except Exception:  # compilers raise errors of many types
        return False
