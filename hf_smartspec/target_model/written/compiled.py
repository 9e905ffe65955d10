"""A written-out decoder as one compiled program: all layers in one call, on a CPU."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from threading import Lock
from typing import Any

import torch

from ...cpu.attention import has_attention
from ...cpu.compact import CompactWeights, can_pack, compact_bytes
from ...cpu.few_tokens import SMALL, most_tokens
from ...cpu.gates import ClampedGate, has_gates
from ...cpu.kernels.norms import CENTERED
from ...cpu.kernels.packed import MOST_TOKENS
from ...cpu.norms import has_norms
from ...cpu.program import DTYPES
from ...cpu.quantized import native
from ...cpu.quantized.product import has_right_kernels
from ...cpu.screening import Screen, can_screen
from ...cpu.tensor_checks import has_sums_of_bits, is_plain, is_vector
from ..attention.seen_lines import has_few_tokens
from ..cache.free_memory import free_bytes
from ..cache.slot_cache import SlotCache
from ..layout.step_layout import StepLayout
from ..recurrent.cache import StateCache
from .copies import KeptCopy
from .experts import Experts
from .forward_writer import ForwardWriter
from .inputs import DecoderInput
from .latent import LatentPlan
from .layer_inputs import LayerInput
from .mixed_mlps import MixedMLP
from .mlps import MLP, XIELU
from .norms import Norm
from .parts import Fused, Rows, Transposed
from .plan import DecoderPlan, FeaturePlan, LayerPlan, absent, products_of
from .program import ForwardProgram
from .rotations import Rotation

# Programs have room for powers of two from `_LEAST` to `_USUAL` tokens. One more, for longer forwards, has room for as
# many as take `_MOST_BYTES`, and `_MOST` at most. Their memory is kept.
_LEAST, _USUAL, _MOST = 16, 256, 4096
_MOST_BYTES = 2**26
# Tokens for which compact weights are read: more take longer than reading, and each few make numbers of the copy anew.
_MOST_COMPACT = {torch.float32: 32, torch.bfloat16: MOST_TOKENS}
_NUM_UNREAD = {torch.float32: 0, torch.bfloat16: 8}  # `KeptCopy`: packed weights save three bits of sixteen
_MOST_MEMORY = 0.5  # of the free memory that these copies take
_PACKING = 128  # forwards that save about as much time with packed weights as packing takes
_APART = 4  # forwards from one packed weight to the next, so that none of them takes much longer


class CompiledDecoder:
    """
    The forward of a decoder by its plan, in one call of compiled code: the results of `WrittenDecoder`, bit for bit.

    Args:
        plan (`DecoderPlan`): A plan that passes `can_compile`.
        whole (`CompiledDecoder`, *optional*): A decoder of the same weights and more, whose copies of them are used.
    """

    def __init__(self, plan: DecoderPlan, whole: "CompiledDecoder | None" = None):
        self.plan = plan
        norm: Any = plan.final_norm
        self.dtype = norm.weights()[0].dtype
        self._most = _USUAL  # tokens of a forward, until a program shows what more would take
        self._most_weights = max(item.shape[0] * item.shape[1] for item in products_of(plan))
        self._free: defaultdict[tuple, list[ForwardProgram]] = defaultdict(list)  # by what they are built for
        self._lock = Lock()  # held while programs are dropped or put back
        # Copies: of the head, from the first forward on that needs no more than best tokens, and of all weights.
        self.screen: KeptCopy[Screen] = KeptCopy(partial(_screen_of, plan), partial(_is_screen_of, plan), 0)
        self.compact: KeptCopy[CompactWeights] = KeptCopy(
            partial(_compact_of, plan), partial(_is_compact_of, plan), _NUM_UNREAD[self.dtype]
        )
        if whole is not None:
            self.screen, self.compact = whole.screen, whole.compact
        self._copies: tuple[Screen | None, CompactWeights | None] = None, None  # when programs were last dropped

    def serves(self, layout: StepLayout, cache: SlotCache) -> bool:
        """
        Return whether compiled code computes this forward: it has no more tokens than programs have room for, and
        columns say what they attend to.
        """
        return (
            (not isinstance(cache, StateCache) or self._serves_states(cache))
            and is_plain(layout.tokens)
            and layout.tokens.shape[1] <= min(self._most, most_tokens(self.dtype))
            and layout.encoded is None
            and not layout.is_padded  # as on GPUs
            and all(has_few_tokens(part, window, self.dtype) for window in self._windows for part in layout.parts)
        )

    def _serves_states(self, cache: StateCache) -> bool:
        """Return whether compiled code computes recurrences: of all rows at once, without limits of time steps."""
        if cache.step.short is None or cache.step.pieces is not None:
            return False
        return not self._limits_prompts or not cache.is_prompt().any()

    @cached_property
    def _limits_prompts(self) -> bool:
        return any(layer.recurrence.is_limited for layer in self.plan.layers if layer.recurrence is not None)

    @cached_property
    def _windows(self) -> set[int | None]:
        return {layer.window for layer in self.plan.layers if layer.attends}

    def run(
        self,
        given: DecoderInput,
        layers: frozenset[int] = frozenset(),
        keep: Callable[[int, torch.Tensor], None] | None = None,
        best_only: bool = False,
    ) -> Any:
        """
        Run all layers, the final norm and the head.

        Args:
            layers (set of `int`), keep (`Callable`): Layers whose hidden states are passed on, as in `WrittenDecoder`.
            best_only (`bool`): Whether the best tokens are enough.

        Returns:
            `torch.Tensor` of shape `[M, vocab_size]`; or `Picks`, where these are enough and found faster.
        """
        room = max(_LEAST, 1 << (len(given.x) - 1).bit_length()) if len(given.x) <= _USUAL else self._most
        # Threads that take part in an operator wait for one another, which takes longer than small ones do.
        num_threads = torch.get_num_threads() if room * self._most_weights > SMALL else 1
        screen = self._current_screen() if best_only else None
        compact = self._current_compact() if len(given.x) <= _MOST_COMPACT[self.dtype] else None
        key = room, num_threads, layers, given.features is not None and given.features.are_states, screen, compact
        try:  # each thread has a forward of its own
            forward = self._free.get(key, []).pop()
        except IndexError:
            forward = ForwardProgram(ForwardWriter(self.plan, given.x, *key))
            with self._lock:
                if self._most == _USUAL:  # else it stays as it is, since forwards that it serves may be about to run
                    self._most = min(max(_MOST_BYTES // forward.bytes_per_token, _USUAL), _MOST)
        try:
            return forward(given, keep)
        finally:
            with self._lock:
                self._drop_outdated()
                if room > _USUAL:  # of these, the latest alone is kept
                    self._drop([other for other in self._free if other[0] > _USUAL])
                if self._are_kept(screen, compact):
                    self._free[key].append(forward)

    def _are_kept(self, screen: Screen | None, compact: CompactWeights | None) -> bool:
        return screen in (None, self.screen.kept) and compact in (None, self.compact.kept)

    def _drop_outdated(self) -> None:
        """Drop programs that read copies which are kept no longer; the lock is held."""
        copies = self.screen.kept, self.compact.kept
        if copies != self._copies:
            self._drop([key for key in list(self._free) if not self._are_kept(*key[-2:])])
            self._copies = copies

    def _drop(self, keys: list[tuple]) -> None:
        for key in keys:
            self._free.pop(key, None)

    def look_at_copies(self, thoroughly: bool = False) -> None:
        """Drop copies of weights that have changed; see `KeptCopy.look`."""
        self.screen.look(thoroughly)
        self.compact.look(thoroughly)
        with self._lock:
            self._drop_outdated()

    def _current_compact(self) -> CompactWeights | None:
        """Return the copies of weights in fewer bits; None where there are none."""
        compact = self.compact.current() if self.dtype is torch.float32 or can_pack() else None
        return compact if compact is not None and compact.copies else None

    def _current_screen(self) -> Screen | None:
        """Return the head's screen; None where reading it whole is faster, and for a while after it has changed."""
        head: Any = self.plan.head
        weight, bias, scale = head.whole()
        if scale is not None or bias is not None or not can_screen(weight):
            return None
        screen = self.screen.current()
        return screen if screen is not None and screen.is_finite else None


def _head_of(plan: DecoderPlan) -> torch.Tensor:
    head: Any = plan.head
    weight: torch.Tensor = head.whole().weight
    return weight


def _screen_of(plan: DecoderPlan) -> Iterator[Screen]:
    yield Screen(_head_of(plan))


def _is_screen_of(plan: DecoderPlan, screen: Screen, thoroughly: bool) -> bool:
    return screen.is_of(_head_of(plan), thoroughly)


def _compact_of(plan: DecoderPlan) -> Iterator[CompactWeights | None]:
    """
    Copy all weights of products: those in bfloat16, which takes as long as it saves in some hundred forwards, after as
    many, and one weight every few forwards. Raise `MemoryError` where memory is scarce.
    """
    norm: Any = plan.final_norm
    is_packed = norm.weights()[0].dtype is torch.bfloat16
    for _ in range(_PACKING if is_packed else 0):
        yield None
    items = [item for item in products_of(plan) if item.whole().scale is None and has_sums_of_bits(item.whole().weight)]
    num_bytes = sum(compact_bytes(item.whole().weight) for item in items)
    if num_bytes > _MOST_MEMORY * free_bytes(torch.device("cpu")):
        raise MemoryError(f"it would take {num_bytes / 2**20:.0f} MiB, more than half of the free memory")
    compact = CompactWeights([weight for item in items for weight in item.weights()])
    for item in items:
        compact.add(item.whole().weight)  # which is not kept here, so that memory of weights that are replaced is freed
        if not compact.is_unchanged():
            break
        for _ in range(_APART if is_packed else 0):
            yield None
    yield compact


def _is_compact_of(plan: DecoderPlan, compact: CompactWeights, thoroughly: bool) -> bool:
    if not thoroughly:
        return compact.is_unchanged()
    return compact.is_of([item.whole().weight for item in products_of(plan)])


def can_compile(plan: DecoderPlan) -> bool:
    """Return whether all parts of a decoder are of kinds that there is compiled code for."""
    if not isinstance(plan.final_norm, Norm):
        return False
    dtype = plan.final_norm.weights()[0].dtype
    if dtype not in DTYPES or not all([has_norms(dtype), has_attention(dtype), has_gates(dtype)]):
        return False
    if plan.calls_modules or not _is_plain(plan.head, dtype) or not _is_norm(plan.final_norm, dtype):
        return False
    if plan.features is not None and not _can_compile_features(plan.features, dtype):
        return False
    inputs = plan.layer_inputs
    if inputs is not None and not (_is_plain(inputs.projection, dtype) and _is_norm(inputs.norm, dtype)):
        return False
    kinds = {type(layer.recurrence) for layer in plan.layers if layer.recurrence is not None}
    return len(kinds) <= 1 and all(_can_compile_layer(layer, dtype) for layer in plan.layers)


def _can_compile_features(plan: FeaturePlan, dtype: torch.dtype) -> bool:
    return (
        plan.both is None
        and all(_is_norm(norm, dtype) for norm in plan.states_norms)
        and _is_plain(plan.states_map, dtype)
        and _is_norm(plan.embedding_norm, dtype)
        and _is_norm(plan.feature_norm, dtype)
    )


def _can_compile_layer(plan: LayerPlan, dtype: torch.dtype) -> bool:
    norms = [plan.before_attention, plan.after_attention, plan.before_mlp, plan.after_mlp]
    norms += [plan.query_norm, plan.key_norm, plan.value_norm]
    mlp, extra, latent = plan.mlp, plan.layer_input, plan.latent
    norms += [] if latent is None else latent.norms
    norms += mlp.norms if isinstance(mlp, MixedMLP) else []
    is_known = not plan.head_dim % 16 if plan.recurrence is None else plan.recurrence.can_compile(dtype)
    is_known = is_known and (mlp is absent or isinstance(mlp, MLP | Experts | MixedMLP))
    return (
        is_known
        and all(norm is None or _is_norm(norm, dtype) for norm in norms)
        and isinstance(plan.rotation, Rotation | None)
        and (mlp is absent or _can_activate(mlp.activation, dtype))  # type: ignore[attr-defined]
        and all(_is_plain(item, dtype) for item in plan.products)
        and (plan.output_gates is None or _is_plain(plan.output_gates, dtype))
        and (extra is None or _can_compile_input(extra, dtype))
        and (plan.factor is None or _is_number(plan.factor.number(), dtype))
        and (latent is None or _can_compile_latents(plan, latent, dtype))
        and (not plan.norms_last or _can_norm_last(plan))
        and (plan.sinks is None or _are_sinks(plan.sinks.numbers(), plan, dtype))
    )


def _can_compile_latents(plan: LayerPlan, latent: LatentPlan, dtype: torch.dtype) -> bool:
    weights = latent.expansion.weights()
    return (
        all(_is_plain(item, dtype) for item in latent.products)
        and all(item.is_cpu and item.dtype is dtype and item.stride(2) == 1 for item in weights)
        and latent.expansion.has_columns
        and not latent.turned_size % 16
        and plan.scaling > 0
    )


def _can_activate(activation: Any, dtype: torch.dtype) -> bool:
    return activation.can_read(dtype) if isinstance(activation, XIELU) else isinstance(activation, int | ClampedGate)


def _can_norm_last(plan: LayerPlan) -> bool:
    """Return whether the norms of queries and keys are RMS norms of heads that differ by their weights alone."""
    query, key = (getattr(norm, "form", CENTERED) for norm in (plan.query_norm, plan.key_norm))
    is_known = plan.norms_heads and query == key < CENTERED
    return is_known and plan.query_norm.eps == plan.key_norm.eps  # type: ignore[union-attr]


def _is_number(factor: torch.Tensor, dtype: torch.dtype) -> bool:
    return factor.dtype is dtype and factor.numel() == 1


def _are_sinks(sinks: torch.Tensor, plan: LayerPlan, dtype: torch.dtype) -> bool:
    return sinks.dtype is dtype and is_vector(sinks, plan.num_heads) and plan.softcap is None


def _can_compile_input(plan: LayerInput, dtype: torch.dtype) -> bool:
    is_known = isinstance(plan.activation, int) and _is_norm(plan.norm, dtype)
    return is_known and all(_is_plain(item, dtype) for item in plan.products)


def _is_norm(norm: Any, dtype: torch.dtype) -> bool:
    if not isinstance(norm, Norm) or len(norm.shape) != 1 or norm.shape[0] % 16:
        return False
    return all(item is None or (item.dtype is dtype and is_vector(item, norm.shape[0])) for item in norm.weights())


def _is_plain(item: Any, dtype: torch.dtype) -> bool:
    """Return whether the weights of a product lie side by side, as numbers that compiled code reads."""
    found = item.whole() if isinstance(item, Fused | Transposed | Rows) else None
    if found is None:
        return False
    weight, bias, scale = found
    if scale is None:
        can_read = weight.is_cpu and weight.dtype is dtype and weight.is_contiguous()
    else:
        can_read = native.can_read(weight, scale, *item.shape) and has_right_kernels(dtype)
    return (
        can_read
        and not item.shape[1] % 16
        and (bias is None or (bias.dtype is dtype and is_vector(bias, item.shape[0])))
    )
