"""Measures what a model's forward costs, once per model and machine, and remembers it on disk."""

import hashlib
import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from ..drafts.tree import DraftTree
from ..goodput.cost import CostModel, CostPoint
from ..log import get_logger
from .layout import CacheRow, RowInput
from .packed import PackedForward
from .written import packed_forward

logger = get_logger(__name__)

_FORMAT = 1  # of the files; others are measured anew
_MIN_ROUNDS, _MAX_ROUNDS = 3, 30  # of all points, after one to warm up
_SECONDS = 5.0  # more rounds than `_MIN_ROUNDS` fit into this

_Setting = tuple[torch.dtype, torch.device, int]  # what may change between two calls; the last is CPU threads

_models: WeakKeyDictionary[PreTrainedModel, tuple[_Setting, CostModel]] = WeakKeyDictionary()
_lock = Lock()


class Design(NamedTuple):
    """One forward to be measured: `rows` rows of `context` cached tokens, each with `width` new ones."""

    rows: int
    context: int
    width: int


# Rows and widths by powers of two up to what a step may reasonably hold, contexts short and long: few points, each of
# which tells something else.
DESIGN = (
    Design(1, 64, 1), Design(1, 64, 4), Design(1, 64, 8), Design(1, 64, 16), Design(1, 64, 32),
    Design(1, 768, 1), Design(1, 768, 16),
    Design(4, 64, 1), Design(4, 64, 4), Design(4, 64, 8), Design(4, 768, 2), Design(4, 768, 8),
    Design(16, 64, 1), Design(16, 64, 2), Design(16, 64, 4), Design(16, 64, 8),
    Design(16, 768, 1), Design(16, 768, 4),
)  # fmt: skip

# Points that the fit does not see.
HELD_OUT = (
    Design(1, 256, 2), Design(1, 256, 6), Design(1, 512, 12), Design(1, 384, 24),
    Design(2, 256, 1), Design(2, 512, 5), Design(3, 128, 3), Design(6, 384, 1), Design(6, 256, 3), Design(8, 128, 2),
    Design(8, 512, 4), Design(8, 256, 12), Design(12, 128, 1), Design(12, 384, 3), Design(16, 256, 6),
)  # fmt: skip


def measure(model: PreTrainedModel, designs: Sequence[Design], progress: bool = True) -> list[CostPoint]:
    """
    Seconds of the packed forward at every point, in the order given; points that need more positions than the model has
    are left out. All points take turns, so that a change in the machine's load meets all of them, and the fastest run
    of each counts: what else the machine does meanwhile is not the model's cost. Leaves the model, and the global
    random states, as they are.

    Raises:
        ValueError: if the model has too few positions for any of them.
    """
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    designs = [item for item in designs if longest is None or item.context + item.width <= longest]
    if not designs:
        raise ValueError(f"A model of {longest} positions is too short to be measured.")
    with torch.no_grad(), _inference_mode(model), _undisturbed_memory():
        num_rows = max(item.rows for item in designs)
        forward = packed_forward(model, num_rows, max(item.context + item.width for item in designs))
        rows = [forward.add() for _ in range(num_rows)]
        tokens = np.arange(max(item.width for item in designs)) % config.vocab_size
        _run(forward, rows, Design(num_rows, 0, 1), tokens, model.device)  # allocates the cache
        seconds: list[list[float]] = [[] for _ in designs]
        start = time.perf_counter()
        for turn in tqdm(_rounds(start), desc="Measuring the model's speed", leave=False, disable=not progress):
            for index in np.random.default_rng(turn).permutation(len(designs)):  # what ran before leaves its mark
                value = _run(forward, rows, designs[index], tokens, model.device)
                if turn > 0:
                    seconds[index].append(value)
    return [
        CostPoint(item.rows * item.context, item.rows * item.width, item.width, min(values))
        for item, values in zip(designs, seconds)
    ]


def _rounds(start: float) -> Iterator[int]:
    """Numbers of rounds, the first one to warm up, as long as there is time."""
    for turn in range(_MAX_ROUNDS + 1):
        if turn > _MIN_ROUNDS and time.perf_counter() - start > _SECONDS:
            return
        yield turn


def _run(
    forward: PackedForward, rows: Sequence[CacheRow], item: Design, tokens: np.ndarray, device: torch.device
) -> float:
    """One forward, of one fed token and a chain in each row. What the cache holds does not change what it costs."""
    used = rows[: item.rows]
    for row in used:
        forward.cut(row, item.context)
    chain = DraftTree.chain(tokens[1 : item.width])
    _synchronize(device)
    start = time.perf_counter()
    forward.forward([RowInput(row, tokens[:1], chain) for row in used])
    _synchronize(device)
    seconds = time.perf_counter() - start
    for row in used:
        forward.cut(row, 0)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@contextmanager
def _inference_mode(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off; every module's training flag comes back, and so do the random states."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def _undisturbed_memory() -> Iterator[None]:
    """What the measurement has allocated on a GPU goes back."""
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def profile_model(model: PreTrainedModel, progress: bool = True) -> CostModel:
    """
    Measures and fits the cost of a model's forward.

    Args:
        model (`PreTrainedModel`): One that the packed forward serves.
        progress (`bool`): Whether to show a bar; `transformers.utils.logging.disable_progress_bar()` hides it too.

    Returns:
        `CostModel`: For contexts, rows and drafts as a step has them.
    """
    return CostModel.fit(measure(model, DESIGN, progress))


def load_or_profile(model: PreTrainedModel, refresh: bool = False, progress: bool = True) -> CostModel:
    """
    The model's cost: as known in this process, from disk, or measured now, which takes seconds. The object is one per
    model, so that what is learnt while serving is not lost, until the model changes its dtype or device, or torch the
    number of its threads.

    Args:
        refresh (`bool`): Measures anew.

    Returns:
        `CostModel`.
    """
    setting = (model.dtype, model.device, torch.get_num_threads())
    with _lock:
        known_setting, known = _models.get(model, (None, None))
        if known is not None and known_setting == setting and not refresh:
            return known
        cost = None if refresh else read_profile(model)
        if cost is None:
            cost = profile_model(model, progress)
            write_profile(model, cost)
        _models[model] = setting, cost
    return cost


def profile_path(model: PreTrainedModel) -> Path:
    """
    The file of the model's profile, under `HF_HOME`. Its name depends on all that the speed does: the model's class,
    configuration, dtype and quantization, the device, threads, and the versions of torch and transformers.
    """
    key = json.dumps(_key(model), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return Path(HF_HOME) / "smartspec" / "profiles" / f"{model.config.model_type}-{digest}.json"


def _key(model: PreTrainedModel) -> dict[str, object]:
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    parts = Counter((type(item).__name__, str(item.dtype), tuple(item.shape)) for item in model.parameters())
    return {
        "class": type(model).__name__,
        "config": json.dumps(config, sort_keys=True, default=str),
        "parts": str(sorted(parts.items())),  # adapters, quantization
        "device": _device_name(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "format": _FORMAT,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.node()} {platform.processor() or platform.machine()} {os.cpu_count()}"


def read_profile(model: PreTrainedModel) -> CostModel | None:
    """The model's profile on disk; one that cannot be read is as good as none."""
    try:
        return CostModel.from_dict(json.loads(profile_path(model).read_text(encoding="utf-8"))["cost"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_profile(model: PreTrainedModel, cost: CostModel) -> None:
    """Whole or not at all: other processes may read and write the same file. Failures are logged."""
    path, content = profile_path(model), {"key": _key(model), "cost": cost.as_dict()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(content, file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning_once(f"The profile of the model's speed is not kept: {error}")
