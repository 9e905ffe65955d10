"""State of a model that is kept from one call to the next: one `ModelState` per model."""

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

from transformers import PreTrainedModel

from ..goodput import Calibrator, CostModel, GoodputAuction
from ..log import get_logger

logger = get_logger(__name__)

_ATTRIBUTE = "_smartspec_state"
_lock = Lock()


class ModelState:
    """
    Everything that is remembered about one model. Only the module named beside an attribute reads and writes it. Calls
    may come from several threads.

    The state is an attribute of the model. So it is freed with the model, although parts of it refer to the model;
    copies of the model start with a new state. Besides it, `enable` sets methods and `smartspec_statistics` on a model.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = ref(model)
        self.lock = Lock()  # held for moments
        self.loading = Lock()  # held while files are read, which takes long: calls without files do not wait for it
        self.warnings: set[str] = set()  # `warn_once`

        # How the model is run
        self.ranks: Any = None  # forward/ranks: the processes that hold it together
        self.obstacles: dict[Any, str | None] = {}  # support/capabilities: results of probes
        self.written: Any = None  # written/registry: its written-out decoder
        self.memory: Any = None  # cache/kept_memory: keys and values of the last call, for the next one
        self.costs: dict[Any, CostModel] = {}  # cost/profiling: by setting
        self.mended_cost: CostModel | None = None  # cost/profiling: one that steps have found wrong

        # What drafts for it
        self.drafters: dict[str, Any] = {}  # prepare/draft_models: loaded ones, by folder or hub id
        self.vocabularies: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()  # prepare/draft_models
        # prepare/presets: sources that remember, with their options, by preset (suffix trees: "") or tuned file
        self.sources: dict[str, tuple[dict[str, Any], Any]] = {}
        self.calibrator = Calibrator()  # prepare/sources: acceptance of fused sources
        self.alarm: Any = None  # decoding/alarm
        self.policies: dict[str, list[GoodputAuction]] = {}  # prepare/call: by source, those that no call uses now

        self.manager: Any = None  # serving/transformers_batching/entries: kept for the next session

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()


def state_of(model: PreTrainedModel) -> ModelState:
    """Return the model's state, a new one at the first call."""
    state = vars(model).get(_ATTRIBUTE)
    if state is None or state.model() is not model:  # a shallow copy has the other model's attributes
        with _lock:
            state = vars(model).get(_ATTRIBUTE)
            if state is None or state.model() is not model:
                state = vars(model)[_ATTRIBUTE] = ModelState(model)
    return state


def forget(model: PreTrainedModel) -> None:
    """Delete the model's state. Weights that were laid side by side in memory stay so."""
    vars(model).pop(_ATTRIBUTE, None)


def warn_once(model: PreTrainedModel, message: str) -> None:
    """Log a warning, once per model and message."""
    state = state_of(model)
    with state.lock:
        is_new = message not in state.warnings
        state.warnings.add(message)
    if is_new:
        logger.warning(message)
