"""Changes to a model that decide how it can be served: adapters per row, quantization across rows."""

from transformers import PreTrainedModel

from ..compat import modules_of

_DYNAMIC = ("torch.ao.nn.quantized.dynamic", "torch.nn.quantized.dynamic")


def has_adapters_by_row(model: PreTrainedModel) -> bool:
    """Return whether PEFT's hooks give every row of the batch an adapter of its own, for the time of this call."""
    hooks = (hook for module in modules_of(model) for hook in module._forward_pre_hooks.values())
    return any(not {"adapter_names", "alora_offsets"}.isdisjoint(getattr(hook, "keywords", ())) for hook in hooks)


def row_mixing(model: PreTrainedModel) -> str | None:
    """Return how rows change one another's results; None where they do not, as far as is known."""
    for module in modules_of(model):
        place = type(module).__module__
        if place.startswith(_DYNAMIC):
            return "quantizes activations by the range of all that runs at once"
        if place.startswith("bitsandbytes.") and getattr(getattr(module, "state", None), "threshold", 0) > 0:
            return "looks for outliers in all that runs at once (`llm_int8_threshold=0.0` does not)"
    return None
