"""Quantization of a loaded model."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...log import get_logger
from . import codes
from .linear import Int4Linear, Int8Linear, QuantizedLinear

logger = get_logger(__name__)

KINDS = ("int8", "int4")
_FEW = 16  # inputs for each output of a layer that has few outputs
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REMEDY = "Load the model anew without it, and quantize that."


def quantize(model: PreTrainedModel, kind: str = "int8", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """
    Replace a model's linear layers by ones in int8, about half the bytes of bfloat16, or in int4, about a third
    (docs/quantized.md). In int4, the output layer is in int8, and so are layers with few outputs, such as routers.

    Embeddings, norms, convolutions, experts that are not `nn.Linear` and DeepSeek's maps from latents (`kv_b_proj`)
    stay as they are. An output layer that is tied to the input embeddings gets a weight of its own. Parameters no
    longer require gradients.

    Args:
        model (`PreTrainedModel`): A model on the CPU, in float32, bfloat16 or float16. It is changed in place.
        kind (`str`): `"int8"` or `"int4"`.
        dtype (`torch.dtype`, *optional*): Dtype of all other parameters afterwards; by default they keep theirs. A
            model that is loaded in float32 for the sake of int4 need not stay in it.

    Returns:
        `PreTrainedModel`: the same object.

    Raises:
        TypeError: if `model` is not a model of transformers.
        ValueError: if `kind` or `dtype` is unknown; if the model is already quantized, is not on the CPU, has adapters,
            has hooks on its linear layers, or has no linear layers; if a weight is beyond what int4 holds, 32,768.
    """
    _check(model, kind, dtype)
    before = _num_bytes(model)
    linears = _linears(model)
    small = {id(linear) for _, _, linear in linears if kind == "int4" and _has_four_bits(model, linear)}
    replaced: dict[int, QuantizedLinear] = {}
    linears.reverse()
    while linears:  # which alone holds them in the end, so that each one's memory is freed before the next
        parent, name, linear = linears.pop()
        if id(linear) not in replaced:
            layer = Int4Linear if id(linear) in small else Int8Linear
            replaced[id(linear)] = layer(linear.weight, linear.bias).train(linear.training)
        setattr(parent, name, replaced[id(linear)])
    del linear
    if dtype is not None:
        _cast(model, dtype)
    _untie(model)
    model.requires_grad_(False)
    vars(model)["hf_quantizer"] = _Quantizer(QuantizationConfigMixin(kind))  # type: ignore[arg-type]
    logger.info(
        f"{type(model).__name__}: {len(replaced)} linear layers in {kind}, {_num_bytes(model) / 2**20:,.0f} MiB of "
        f"weights in place of {before / 2**20:,.0f}."
    )
    return model


def _has_four_bits(model: PreTrainedModel, linear: Any) -> bool:
    """Return whether a linear layer is in four bits, in int4: layers with few outputs take little memory anyway."""
    return linear is not model.get_output_embeddings() and linear.out_features * _FEW > linear.in_features


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast all parameters but scales. Buffers stay as they are, as when a model is loaded in the dtype."""
    scales = {id(module.scale) for module in model.modules() if isinstance(module, QuantizedLinear)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in scales:
            parameter.data = parameter.data.to(dtype)


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether `quantize` has changed the model."""
    return isinstance(getattr(model, "hf_quantizer", None), _Quantizer)


class _Quantizer(HfQuantizer):
    """The model's quantizer, as transformers asks for it: the model cannot be saved, trained or compiled."""

    def is_serializable(self) -> bool:
        logger.warning("Save the model as it is before `quantize`, and quantize it after loading.")
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _check(model: PreTrainedModel, kind: str, dtype: torch.dtype | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"`kind` must be {' or '.join(map(repr, KINDS))}, got {kind!r}.")
    if dtype not in (None, *_DTYPES):
        raise ValueError(f"`dtype` must be torch.float32, torch.bfloat16 or torch.float16, got {dtype!r}.")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"`model` must be a model of transformers, got {type(model).__name__}. A model with adapters of PEFT can "
            "be quantized after `merge_and_unload()`."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"{type(model).__name__} is quantized already. {_REMEDY}")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise ValueError(
            f"`model` must be on the CPU, got parameters on {', '.join(sorted(devices))}. On a GPU, load it with a "
            "`quantization_config` of transformers; a model that is offloaded cannot be quantized."
        )
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has adapters. Merge them into the weights (PEFT's `merge_and_unload()`) first."
        )
    linears = _linears(model)
    if not linears:
        raise ValueError(f"{type(model).__name__} has no `nn.Linear` to quantize.")
    for _, name, linear in linears:
        _check_linear(name, linear)
        if kind == "int4" and _has_four_bits(model, linear):
            codes.check(linear.weight)


def _check_linear(name: str, linear: Any) -> None:
    if type(linear.weight) is not nn.Parameter:
        raise ValueError(f"`{name}` is quantized already: its weight is a {type(linear.weight).__name__}. {_REMEDY}")
    if linear.weight.dtype not in _DTYPES:
        raise ValueError(f"`{name}` must be in float32, bfloat16 or float16, got {linear.weight.dtype}.")
    if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
        raise ValueError(f"`{name}` has hooks or a forward of its own, which would be lost. Remove them first.")


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """
    Return the linear layers, each with the module that holds it and its name there. Those of DeepSeek's kinds that make
    keys and values of latents are left out: attention multiplies by their columns, too.
    """
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if type(child) is nn.Linear and name != "kv_b_proj"
    ]


def _untie(model: Any) -> None:
    """Keep transformers from tying the output layer to the embeddings again, now that it has a weight of its own."""
    head = model.get_output_embeddings()
    if not isinstance(head, QuantizedLinear):
        return
    names = [name for name, module in model.named_modules() if module is head]
    for name in names:
        if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
            model.config.tie_word_embeddings = model.config.get_text_config(decoder=True).tie_word_embeddings = False


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
