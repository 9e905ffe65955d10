"""
MTP layers (DeepSeek-V3, arXiv 2412.19437, section 2.2), with which a target was trained to predict further tokens.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ...target_model.drafters.features import Layers
from ...target_model.drafters.mtp import PackedMtp
from ...target_model.support.capabilities import packing_obstacle
from ..committed import LAST
from .learned import FeatureDrafter

MTP = "mtp"

# Types whose files hold an MTP layer with full attention, of which transformers' configs say nothing.
_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class MtpLayers(FeatureDrafter):
    """
    The MTP layers of a target, with its own embeddings and head; see `PackedMtp`.

    Args:
        model (`MtpModel`): transformers' own. What it shares with the target is no part of this module.
    """

    hidden_layers = (LAST,)
    token_ids = None

    def __init__(self, model: MtpModel):
        super().__init__()
        self.blocks = model.layers
        self.packed = PackedMtp(model)  # no module: to move or train this one does not touch the target
        self.config = model.config
        self.target_size, self.vocab_size = model.config.hidden_size, model.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.packed.num_layers

    @property
    def _projection(self) -> torch.Tensor:
        layer: Any = self.blocks[0]
        weight: torch.Tensor = layer.eh_proj.weight
        return weight

    @property
    def dtype(self) -> torch.dtype:
        return self._projection.dtype

    @property
    def device(self) -> torch.device:
        return self._projection.device

    def layers(self) -> Layers:
        return self.packed.run

    @classmethod
    def from_pretrained(cls, name: str | Path, target: PreTrainedModel) -> "MtpLayers":
        """
        Read the layers from the target's own files, once more: loading the target has dropped them.

        Args:
            name (`str`): "mtp".

        Raises:
            ValueError: if the target has none, or its files do not hold them, or they cannot be packed.
        """
        kind = type(target).__name__
        output: Any = target.get_output_embeddings()
        described = _described(target)
        if not getattr(described.config.get_text_config(decoder=True), "num_mtp_layers", None):
            raise ValueError(f"`assistant={MTP!r}`: {kind} has no MTP layers that transformers knows of.")
        if (obstacle := packing_obstacle(target)) is not None:
            raise ValueError(f"`assistant={MTP!r}`: {obstacle}.")
        device = output.weight.device
        try:
            model = MtpModel.from_pretrained(described, device_map={"": device})
        except Exception as error:  # of many kinds: no files, none of these names, not all of them
            raise ValueError(
                f"`assistant={MTP!r}`: the MTP layers of {kind} cannot be read from {target.config.name_or_path!r}: "
                f"{error}"
            ) from error
        for part in (model.layers, getattr(model, "shared_post_norm", None)):
            if part is not None:  # transformers goes by the config, not by what the target has become
                part.eval().to(device=device, dtype=target.dtype).requires_grad_(False)
        layers = cls(model)
        layers.name_or_path = str(name)
        return layers

    def check_fit(self, target: PreTrainedModel) -> None:
        """Raise `ValueError` unless these are layers of a target of this size."""
        config = target.config.get_text_config(decoder=True)
        sizes = [(item.hidden_size, item.vocab_size) for item in (self.config, config)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"MTP layers of hidden size {sizes[0][0]} and {sizes[0][1]} tokens do not fit a target of hidden size "
                f"{sizes[1][0]} and {sizes[1][1]} tokens."
            )


def is_mtp(name: str, config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a name stands for the target's own layers."""
    return name == MTP


def _described(target: PreTrainedModel) -> PreTrainedModel:
    """Return the target as `MtpModel` reads it: for those of Qwen, a view whose config tells of their layer."""
    config = target.config.get_text_config(decoder=True)
    # MtpModel takes the class of norms from the target's last layer: those of recurrent layers need a gate.
    if config.model_type not in _QWEN or config.layer_types[-1] != "full_attention":
        return target
    view: Any = copy.copy(target)  # shares all modules
    view.config = copy.deepcopy(target.config)
    config = view.config.get_text_config(decoder=True)
    config.num_mtp_layers = getattr(config, "mtp_num_hidden_layers", 1)
    config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers
    view._keys_to_ignore_on_load_unexpected = [r"^mtp\."]  # not the tensors of images
    return view
