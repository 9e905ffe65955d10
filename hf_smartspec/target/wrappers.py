"""What others have done to a model that decides how it can be served: adapters per row, dynamic quantization."""

from transformers import PreTrainedModel

_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.nn.quantized.dynamic")


def has_adapters_by_row(model: PreTrainedModel) -> bool:
    """Whether PEFT's hooks give every row of the batch an adapter of its own, for the time of this call."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(not {"adapter_names", "alora_offsets"}.isdisjoint(getattr(hook, "keywords", ())) for hook in hooks)


def mixes_rows(model: PreTrainedModel) -> bool:
    """Whether activations are quantized by the range of the whole batch, so that rows change one another's results."""
    return any(type(module).__module__.startswith(_DYNAMIC) for module in model.modules())
