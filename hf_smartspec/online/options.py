"""Options of drafters that learn while they serve."""

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..validate import check_positive
from .buffer import EVICTIONS
from .losses import LOSSES

OPTIMIZERS = ("adamw", "adamw_8bit")
POSITIONS = ("all", "errors")
SAMPLINGS = ("teacher", "student", "mixed")
PRESETS: dict[str, dict[str, Any]] = {  # "published": algorithm 1 of the paper
    "published": {
        "every_requests": 8,
        "positions": "errors",
        "top_k": None,
        "max_bytes": 2**32,
        "eviction": "release",
        "replay": 0.0,
        "shadow": 0,
        "background": False,
    }
}


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """See `OnlineDistillation`."""

    every_requests: int | None = 8
    most_requests: int | None = None
    every_tokens: int | None = None
    every_seconds: float | None = None
    loss: str = "kl"
    beta: float = 0.5
    temperature: float = 1.0
    positions: str = "all"
    sampling: str = "teacher"
    top_k: int | None = 64
    max_bytes: int = 2**28
    eviction: str = "newest"
    replay: float = 2.0
    passes: int = 1
    batch_tokens: int = 2048
    max_length: int = 1024
    learning_rate: float = 5e-4
    optimizer: str = "adamw"
    background: bool = True
    max_running: int = 0
    shadow: int = 8
    tolerance: float = 0.005
    checkpoint: str | Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("every_requests", "most_requests", "every_tokens", "top_k"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("max_bytes", "passes", "batch_tokens", "max_length"):
            check_positive(name, getattr(self, name))
        if self.max_length < 2:
            raise ValueError(f"`max_length` must be at least 2, got {self.max_length!r}.")
        known = {
            "loss": LOSSES,
            "positions": POSITIONS,
            "sampling": SAMPLINGS,
            "eviction": EVICTIONS,
            "optimizer": OPTIMIZERS,
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"`{name}` must be one of {list(values)}, got {getattr(self, name)!r}.")
        if self.learns_drafts and self.positions == "errors":
            raise ValueError(
                f"`positions='errors'` marks errors in the target's text and needs `sampling='teacher'`, got "
                f"{self.sampling!r}."
            )
        if not any((self.every_requests, self.every_tokens, self.every_seconds)):
            raise ValueError("`every_requests`, `every_tokens` and `every_seconds` must not all be None or 0.")
        least = self.every_requests
        if self.most_requests is not None and least is None:
            raise ValueError("`most_requests` is the longest interval of `every_requests`, which is None.")
        if self.most_requests is not None and least is not None and self.most_requests < least:
            raise ValueError(
                f"`most_requests` must be at least `every_requests`, {self.every_requests!r}, got "
                f"{self.most_requests!r}."
            )
        if not 0 < self.beta < 1:
            raise ValueError(f"`beta` must lie between 0 and 1, got {self.beta!r}.")
        for name in ("temperature", "learning_rate", "every_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive, got {value!r}.")
        for name in ("replay", "max_running", "shadow", "tolerance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)!r}.")
        if self.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError('`optimizer="adamw_8bit"` needs bitsandbytes: pip install "hf-smartspec[quantization]".')

    @classmethod
    def of(cls, preset: str | None = None, **options: Any) -> "LearningOptions":
        """Return the options of a preset, changed by `options`; raise `ValueError` for an unknown preset."""
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"`preset` must be one of {list(PRESETS)} or None, got {preset!r}.")
        return cls(**PRESETS.get(preset or "", {}) | options)

    @property
    def learns_drafts(self) -> bool:
        """Return whether rejected drafts are learnt from, too."""
        return self.sampling != "teacher"

    def new_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "adamw_8bit":
            optimizers: Any = importlib.import_module("bitsandbytes.optim")
            found: torch.optim.Optimizer = optimizers.AdamW8bit(
                parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )
            return found
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
