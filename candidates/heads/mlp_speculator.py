"""
MLP speculators (Wertheimer et al., arXiv 2404.19124), small recurrent nets that start from the target's hidden state,
and the source that drafts with them.
"""

import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import embedding, gelu, linear, rms_norm
from transformers import PreTrainedConfig, PreTrainedModel

from ...target_model.forward.ragged import PlannedForward, RaggedForward
from ...target_model.layout.rows import CacheRow, RowInput
from ..committed import HIDDEN_STATES, LAST, Committed
from ..models.draft_growth import DraftState, Growth
from ..models.growing import GrowingCandidates
from ..request import SourceRequest
from .files import CONFIG, check_numbers, config_of, folder_of, kinds_of, read_tensors
from .learned import LearnedDrafter

_NAME = re.compile(r"(?:speculator\.)?(emb|proj|head|ln)\.(\d+)\.(weight|bias)")
_BEGINNINGS = ("speculator.", "emb.", "proj.", "head.", "ln.")
_PARTS = ("emb.weight", "proj.weight", "ln.weight", "ln.bias", "head.weight")
_EPSILON = 1e-6


class MLPSpeculator(LearnedDrafter):
    """
    Drafts n tokens, one after another. Step i computes, from the state of the step before it (step 0: the target's last
    hidden state after the final norm) and the newest token,

        state <- gelu(LN_i(P_i state + c E_i[token])),    logits = H_i state

    LN being a root mean square norm with scale and shift. c makes the target's state half of the last one.

    Args:
        parts (mapping of `str` to lists of `torch.Tensor`): "emb.weight" `[vocab, inner]`, "proj.weight" `[inner,
            hidden]`, then `[inner, inner]`, "ln.weight" and "ln.bias" `[inner]`, "head.weight" `[vocab, inner]`: one
            for each step, or one for all (two of "proj.weight", for the first step and the others).
        num_steps (`int`): n.
        scales_input (`bool`): The target's state is normalized, and divided by the root of 2.

    Raises:
        ValueError: for parts that are missing, or too many.
    """

    def __init__(self, parts: Mapping[str, list[torch.Tensor]], num_steps: int, scales_input: bool = False):
        super().__init__()
        numbers = {name: len(parts.get(name, ())) for name in _PARTS}
        is_right = [
            num in (num_steps, min(num_steps, 2 if name == "proj.weight" else 1)) for name, num in numbers.items()
        ]
        if num_steps < 1 or not all(is_right):
            raise ValueError(
                f"An MLP speculator of {num_steps} steps needs {num_steps} of every part, or one for all steps (two of "
                f"'proj.weight'), got {numbers}."
            )
        self.num_steps, self.scales_input = num_steps, scales_input
        self.parts = nn.ModuleDict({name.replace(".", "_"): _frozen(parts[name]) for name in _PARTS})
        state_weight = 0.5 ** (0.5 / num_steps)
        self._token_weight = ((1 - state_weight**2) * self.inner_size / 2) ** 0.5 / state_weight

    def _part(self, name: str, step: int) -> torch.Tensor:
        items: Any = self.parts[name]
        found: torch.Tensor = items[min(step, len(items) - 1)]
        return found

    @property
    def inner_size(self) -> int:
        return self._part("proj_weight", 0).shape[0]

    @property
    def hidden_size(self) -> int:
        return self._part("proj_weight", 0).shape[1]

    @property
    def vocab_size(self) -> int:
        return self._part("head_weight", 0).shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._part("head_weight", 0).dtype

    @property
    def device(self) -> torch.device:
        return self._part("head_weight", 0).device

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, states: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Run one step: from tokens `[N]`, and the states `[N, hidden]` that they were picked by (`[N, inner]` after step
        0), compute the new states `[N, inner]` and logits `[N, vocab]`.
        """
        states = states.to(device=self.device, dtype=self.dtype)
        if step == 0 and self.scales_input:
            states = rms_norm(states, states.shape[-1:], eps=_EPSILON) / 2**0.5
        states = linear(states, self._part("proj_weight", step))
        states = states + embedding(tokens, self._part("emb_weight", step)) * self._token_weight
        states = rms_norm(states, states.shape[-1:], self._part("ln_weight", step), _EPSILON)
        states = gelu(states + self._part("ln_bias", step))
        return states, linear(states, self._part("head_weight", step))

    def save_pretrained(self, folder: str | Path, **config: Any) -> None:
        """Write `model.safetensors` and `config.json`, with further entries."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Any] = {name: self.parts[name.replace(".", "_")] for name in _PARTS}
        tensors = {
            f"speculator.{kind}.{step}.{what}": item.detach().contiguous()
            for kind, what, items in ((*name.split("."), items) for name, items in parts.items())
            for step, item in enumerate(items)
        }
        save_file(tensors, folder / "model.safetensors")
        content = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "n_predict": self.num_steps,
            "emb_dim": self.hidden_size,
            "inner_dim": self.inner_size,
            "vocab_size": self.vocab_size,
            "tie_weights": len(parts["head.weight"]) < self.num_steps,
            "scale_input": self.scales_input,
        }
        (folder / CONFIG).write_text(json.dumps(content | config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name: str | Path, target: PreTrainedModel) -> "MLPSpeculator":
        """
        Read the published files of a folder or hub id. Tied weights may be there once or several times.

        Raises:
            ValueError: if the files hold no MLP speculator, or one for another target.
        """
        config, tensors = config_of(str(name)), read_tensors(folder_of(name))
        try:
            check_numbers({key: item for key, item in tensors.items() if key.startswith(_BEGINNINGS)})
            parts = _parts(tensors)
            num_steps = config.get("n_predict", max(map(len, parts.values()), default=0))
            if type(num_steps) is not int:
                raise ValueError(f"`n_predict` must be a whole number, got {num_steps!r}.")
            speculator = cls(parts, num_steps, bool(config.get("scale_input", False)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return speculator._placed(name, target)

    def check_fit(self, target: PreTrainedModel) -> None:
        """Raise `ValueError` unless it has this target's sizes."""
        config, name = target.config.get_text_config(decoder=True), self.name_or_path or "this MLP speculator"
        hidden, vocab, inner = config.hidden_size, config.vocab_size, self.inner_size
        rows, line = (vocab, inner), (inner,)
        expected = {"emb_weight": rows, "ln_weight": line, "ln_bias": line, "head_weight": rows}
        parts: Any = self.parts
        for part, items in parts.items():
            for step, item in enumerate(items):
                shape = expected.get(part) or (inner, inner if step else hidden)
                if tuple(item.shape) != shape:
                    raise ValueError(
                        f"{name}: {part} {tuple(item.shape)} of step {step} does not fit a target of hidden size "
                        f"{hidden} and {vocab} tokens, for which it must be {shape}."
                    )


def is_speculator_checkpoint(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a folder or hub id holds an MLP speculator, by its config."""
    config = config_of(name) if config is None else config
    return any(kind.replace("_", "").startswith("mlpspeculator") for kind in kinds_of(config))


def _parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of every part, by step."""
    found: dict[str, dict[int, torch.Tensor]] = {part: {} for part in _PARTS}
    for name, tensor in tensors.items():
        if match := _NAME.fullmatch(name):
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    for part, items in found.items():
        if sorted(items) != list(range(len(items))):
            raise ValueError(f"An MLP speculator with {part} of steps {sorted(items)} lacks those of others.")
    return {part: [items[step] for step in sorted(items)] for part, items in found.items()}


def _frozen(tensors: list[torch.Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


@dataclass(eq=False)
class _State(DraftState):
    """State of one request: its newest token, and the hidden state `[1, hidden]` that this was picked by."""

    hidden: torch.Tensor | None = None

    def features(self) -> torch.Tensor | None:
        return self.hidden


class _SpeculatorForward(RaggedForward):
    """Forward of an MLP speculator's steps for the whole batch. Rows hold no keys and values."""

    def __init__(self, speculator: MLPSpeculator):
        nothing_attends = PreTrainedConfig.from_dict({"hidden_size": speculator.hidden_size})
        super().__init__(nothing_attends, speculator.device, speculator.dtype)
        self.speculator = speculator

    @property
    def device(self) -> torch.device:
        return self.speculator.device

    def _run(self, planned: PlannedForward) -> torch.Tensor:
        states = planned.features
        if states is None:
            states = torch.cat([item.features for item in planned.rows if item.features is not None])
        step = _depth(planned.rows[0])
        planned.hidden, logits = self.speculator(planned.layout.tokens[0], states, step)
        return logits


def _depth(item: RowInput) -> int:
    """Return the depth of the tokens that are run: 0 for the text's last one."""
    depth, node = 0, item.first_node if item.num_nodes else -1
    while node >= 0:
        depth, node = depth + 1, int(item.tree.parents[node])
    return depth


class MLPSpeculatorCandidates(GrowingCandidates):
    """
    Drafts with an MLP speculator: trees grow step by step, by its own confidence, as deep as it has steps.

    Args:
        heads (`MLPSpeculator`): On the device of the target's output.
        num_nodes, width, confidence_threshold, samples: See `GrowingCandidates`.
    """

    label = "mlp_speculator"
    needs = frozenset({HIDDEN_STATES})
    follows_target = True
    is_learned = True
    hidden_layers = (LAST,)

    def __init__(
        self,
        heads: MLPSpeculator,
        num_nodes: int | None = None,
        width: int | None = None,
        confidence_threshold: float = 0.0,
        samples: bool = False,
    ):
        # Its texts have one token, so that its positions are its steps.
        super().__init__(num_nodes, width, confidence_threshold, samples, num_positions=heads.num_steps)
        self.heads = heads

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.heads.identity})"

    def _new_forward(self) -> _SpeculatorForward:
        return _SpeculatorForward(self.heads)

    def _new_state(self, row: CacheRow, prompt: np.ndarray) -> _State:
        return _State(row, prompt[-1:].tolist())

    def _can_grow(self, growth: Growth) -> bool:
        return growth.state.features() is not None

    def begin(self, request: SourceRequest) -> int:
        super().begin(request)
        return request.num_cached  # only the newest hidden state is used

    def observe(self, request_id: Hashable, committed: Committed) -> None:
        state, hidden = self._states[request_id], committed.hidden_states.get(LAST)
        assert isinstance(state, _State)
        state.tokens = [*state.tokens, *committed.tokens.tolist()][-1:]
        state.num_generated += len(committed.tokens)
        if hidden is not None and len(hidden):
            state.hidden = hidden[-1:]
