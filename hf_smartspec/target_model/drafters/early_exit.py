"""The first layers of a model, on the keys and values that its whole forward has left."""

from dataclasses import replace

from ..forward.packed import PackedForward
from ..layout.rows import CacheRow
from ..written import written_decoder
from ..written.decoder import WrittenDecoder
from ..written.plan import DecoderPlan


class EarlyExitForward(PackedForward):
    """
    Runs the first layers of a model, its final norm and its head, over the rows of another forward of that model. The
    text's keys and values are those that the whole forward has left; behind them stand those of what is run here, until
    the whole forward writes its own to the same places.

    Args:
        whole (`PackedForward`): Whose rows these are.
        num_layers (`int`): How many layers are run.
    """

    def __init__(self, whole: PackedForward, num_layers: int):
        super().__init__(whole.model, choose=self._first_layers)
        self.whole, self.num_layers = whole, num_layers
        self._decoders: tuple[WrittenDecoder, WrittenDecoder] | None = None  # the whole, and its first layers

    def share(self) -> None:
        """The whole forward's memory is this one's; comes before anything is run, since that may have got other."""
        self.cache = self.whole.cache

    def remove(self, row: CacheRow) -> None:
        """The row is the whole forward's: nothing happens."""

    def _first_layers(self) -> WrittenDecoder:
        whole = written_decoder(self.model)
        if whole is None:
            raise RuntimeError("the first layers cannot be run by themselves: somebody has changed or hooked the model")
        if self._decoders is None or self._decoders[0] is not whole:
            self._decoders = whole, WrittenDecoder(_cut_off(whole.plan, self.num_layers))
        return self._decoders[1]


def _cut_off(plan: DecoderPlan, num_layers: int) -> DecoderPlan:
    """The same with the first layers only."""
    layers = plan.layers[:num_layers]
    rotary_types = dict.fromkeys(layer.layer_type for layer in layers if layer.rotation is not None)
    return replace(plan, layers=layers, rotary_types=tuple(rotary_types))
