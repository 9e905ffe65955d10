"""Profiles of a model's forward: measured once per model and machine, and kept on disk."""

import hashlib
import json
import os
import platform
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel

from ...cpu.quantized import is_quantized
from ...files import replacing
from ...goodput.cost import CostModel
from ...log import get_logger
from ..forward.ranks import broadcast_from_rank0, is_sharded
from ..graphs import records
from ..model_state import state_of
from ..written import written_decoder, written_decoders
from .measuring import DESIGN, is_busy, measure, warm_up

logger = get_logger(__name__)

_FORMAT = 11  # also raised when forwards become faster, so that older profiles no longer count
_MOST_TIMES = 4  # automatic measurements of a model; profiles may also seem wrong for what steps do besides
_COMPARED = 64  # tokens up to which two profiles are compared

_Setting = tuple[torch.dtype, torch.device, int, str]  # may change between two calls; the last are CPU threads and mode

_mended: set[Path] = set()  # profiles that this process has found wrong
_lock = Lock()


def profile_model(model: PreTrainedModel, progress: bool = True) -> CostModel:
    """
    Measure and fit the cost of a model's forward.

    Args:
        model (`PreTrainedModel`): A model that the packed forward serves.
        progress (`bool`): Whether to show a bar; `transformers.utils.logging.disable_progress_bar()` hides it too.

    Returns:
        `CostModel`: The cost by context, rows and drafts of a step; provisional if the machine was busy meanwhile.
    """
    return measure(model, DESIGN, progress=progress).cost()


def load_or_profile(model: PreTrainedModel, refresh: bool = False, progress: bool = True) -> CostModel:
    """
    Return the model's cost: known in this process, read from disk (then the model is warmed up), or measured now, which
    takes seconds. There is one object for each of the model's dtypes, devices, modes and numbers of torch's threads, so
    that what is learnt while serving outlasts a change of these. A provisional profile on disk is used while the
    machine is busy, and measured anew as soon as a process finds it quiet.

    Args:
        refresh (`bool`): Whether to measure anew. On a busy machine, a profile of lower costs stands all the same.

    Returns:
        `CostModel`: The cost, shared by all callers with the same setting.
    """
    # A model that cannot be tried out yet is measured, and filed, by the forward that runs it now.
    with written_decoders(written_decoder(model) is not None):
        setting = _setting_of(model)
        with _lock:
            known = state_of(model).costs
            if setting in known and not refresh:
                return known[setting]
            kept = None if refresh else broadcast_from_rank0(model, lambda: _usable(model))
            if kept is None:
                measured = profile_model(model, progress)
                known[setting] = broadcast_from_rank0(model, lambda: keep_profile(model, measured, is_asked=refresh))
                return known[setting]
            known[setting] = kept
        if model.device.type == "cpu" and written_decoder(model) is not None:
            _warm_up(model)
    return kept


def _warm_up(model: PreTrainedModel) -> None:
    try:
        warm_up(model)
    except (RuntimeError, MemoryError) as error:  # torch's allocator raises the former; steps do without
        logger.debug("The model was not warmed up.", exc_info=error)


def _setting_of(model: PreTrainedModel) -> _Setting:
    return model.dtype, model.device, torch.get_num_threads(), mode_of(model)


def profile_path(model: PreTrainedModel) -> Path:
    """
    Return the path of the model's profile, under `HF_HOME`. Its name depends on all that affects speed: the model's
    class, configuration, dtype and quantization, how it is run, the device, threads, and the versions of torch and
    transformers.
    """
    key = json.dumps(_key(model), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return Path(HF_HOME) / "smartspec" / "profiles" / f"{model.config.model_type}-{digest}.json"


def mode_of(model: PreTrainedModel) -> str:
    """
    Describe how the model's forward is run: all that makes it faster or slower and may be switched on and off. A
    profile holds for one mode only.
    """
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    forward = "own forward"
    if written_decoder(model) is not None:
        forward = "written out, recorded" if records(model.device) else "written out"
    weights = "quantized weights, " if is_quantized(model) else ""
    return f"{forward}, {attention} attention, {weights}cache in {model.dtype}"


def _key(model: PreTrainedModel) -> dict[str, object]:
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    parts = Counter((type(item).__name__, str(item.dtype), tuple(item.shape)) for item in model.parameters())
    return {
        "class": type(model).__name__,
        "config": json.dumps(config, sort_keys=True, default=str),
        "parts": str(sorted(parts.items())),  # adapters, quantization
        "mode": mode_of(model),
        "ranks": model._tp_size if is_sharded(model) else 1,
        "device": _device_name(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "format": _FORMAT,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type} {platform.node()} {processor} {os.cpu_count()}"


def read_profile(model: PreTrainedModel) -> CostModel | None:
    """Return the model's profile on disk; None where there is none that can be read."""
    try:
        return CostModel.from_dict(_read(model)["cost"])
    except (ValueError, KeyError, TypeError):
        return None


def _usable(model: PreTrainedModel) -> CostModel | None:
    """Return the profile on disk, unless it is provisional and a better one can be measured now."""
    cost = read_profile(model)
    if cost is None or (cost.is_provisional and _times(model) < _MOST_TIMES and not is_busy()):
        return None
    return cost


def _read(model: PreTrainedModel) -> dict[str, Any]:
    """Return the content of the model's file; empty where it is missing or cannot be read."""
    try:
        content = json.loads(profile_path(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_profile(model: PreTrainedModel, measured: CostModel, is_asked: bool = False) -> CostModel:
    """
    File a new profile, and return the one that stands: the new one if it was measured on a quiet machine, else that of
    lower costs, since other work only makes forwards slower. The file is written whole or not at all, since other
    processes may read and write it. Failures are logged.

    Args:
        is_asked (`bool`): Whether the user asked for the measurement, so that it does not count as automatic.
    """
    kept, stands = read_profile(model), measured
    if measured.is_provisional:
        if kept is not None and _level(kept) < _level(measured):
            stands = kept
        logger.info(
            f"The machine was busy while {type(model).__name__} was measured: "
            + ("the earlier profile stands." if stands is kept else "the profile is provisional.")
        )
    _write(model, {"cost": stands.as_dict(), "times": _times(model) + (not is_asked)})
    return stands


def _level(cost: CostModel) -> float:
    """Return the mean log seconds of the smaller forwards that are measured."""
    items = [item for item in DESIGN if item.batched <= _COMPARED]
    sizes = np.array([(item.rows * item.context, item.batched, item.width) for item in items], np.float64).T
    return float(np.log(cost.profiled(*sizes)).mean())


def mend_profile(model: PreTrainedModel, cost: CostModel) -> None:
    """
    Replace the model's profile by what steps have taken, if these have shown that it is wrong. What they took is
    provisional, since it holds for the sizes of these steps only: a process that finds the machine quiet measures the
    model anew, a limited number of times, since a lasting difference is not the profile's fault. This is done once per
    process. Costs that are not from the model's profile are ignored.
    """
    if not cost.is_wrong:
        return
    with _lock:
        state = state_of(model)
        if state.mended_cost is cost or state.costs.get(_setting_of(model)) is not cost:
            return
        state.mended_cost = cost
        path = profile_path(model)  # takes milliseconds, so after the cheaper checks: this runs after every call
        if path in _mended:
            return
        _mended.add(path)
        # Still locked, so that the profile of a thread that measures the model anew is not overwritten. Another process
        # may have replaced it: then it is left alone.
        if read_profile(model) != cost:
            return
        times = _times(model)
        mended = replace(cost.mended(), is_provisional=times < _MOST_TIMES)
        _write(model, {"cost": mended.as_dict(), "times": times})
    if not cost.is_provisional:
        logger.warning(
            f"Steps of {type(model).__name__} take other times than its profile predicts. The profile now holds these: "
            "it will be measured anew when a process finds the machine quiet."
        )


def _times(model: PreTrainedModel) -> int:
    """Return how often the model was measured automatically for its profile."""
    known = _read(model).get("times")
    return known if isinstance(known, int) else 0


def _write(model: PreTrainedModel, content: dict[str, Any]) -> None:
    path = profile_path(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"key": _key(model)} | content, indent=2).encode())
    except OSError as error:
        logger.warning_once(f"The profile of the model's speed is not kept: {error}")
