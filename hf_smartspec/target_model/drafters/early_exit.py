"""The first layers of a model, over the keys and values that its whole forward has computed."""

from dataclasses import replace

from ..forward.packed import PackedForward
from ..layout.rows import CacheRow
from ..written import written_decoder
from ..written.decoder import WrittenDecoder
from ..written.plan import DecoderPlan


class EarlyExitForward(PackedForward):
    """
    Forward of a model's first layers, final norm and head, over the rows of another forward of that model. The
    text's keys and values are those of the whole forward; after them come those of tokens run here, until the whole
    forward writes its own to the same places.

    Args:
        whole (`PackedForward`): The forward whose rows these are.
        num_layers (`int`): The number of layers to run.
    """

    def __init__(self, whole: PackedForward, num_layers: int):
        super().__init__(whole.model, choose=self._first_layers)
        self.whole, self.num_layers = whole, num_layers
        self._decoders: tuple[WrittenDecoder, WrittenDecoder] | None = None  # the whole, and its first layers

    def share(self) -> None:
        """
        Use the whole forward's cache. Call this before anything is run, since that forward may have got another one.
        """
        self.cache = self.whole.cache

    def remove(self, row: CacheRow) -> None:
        """Do nothing: the row belongs to the whole forward."""

    def _first_layers(self, may_wait: bool) -> WrittenDecoder:
        whole = written_decoder(self.model, may_wait=may_wait)
        if whole is None:
            raise RuntimeError("the first layers cannot be run by themselves: the model was changed or hooked")
        if self._decoders is None or self._decoders[0] is not whole:
            self._decoders = whole, WrittenDecoder(_cut_off(whole.plan, self.num_layers), whole)
        return self._decoders[1]


def _cut_off(plan: DecoderPlan, num_layers: int) -> DecoderPlan:
    """Return the plan of the first layers only."""
    layers = plan.layers[:num_layers]
    rotary_types = dict.fromkeys(layer.layer_type for layer in layers if layer.rotation is not None)
    return replace(plan, layers=layers, rotary_types=tuple(rotary_types))
