"""What a model can do: whether trees can be packed in its forward."""

from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafts.tree import DraftTree
from .compat import TESTED_MODEL_TYPES
from .layout import RowInput
from .packed import PackedForward

# What configs call the reach of local attention.
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")

_probed: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def prepares_own_inputs(model: PreTrainedModel) -> bool:
    """Whether a forward is fed more than the tokens that it is asked for, which the packed forward would not know."""
    own = vars(model).get("prepare_inputs_for_generation")
    if own is None:
        function = type(model).prepare_inputs_for_generation  # type: ignore[attr-defined]
        return not function.__module__.startswith("transformers.")
    # PEFT's wrappers set theirs for the time of the call; only adapters that learn prompts change anything in it.
    peft_config = getattr(getattr(own, "__self__", None), "active_peft_config", None)
    return getattr(peft_config, "is_prompt_learning", True)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model can run packed trees: by its type, else by comparing a small forward, once per model."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or prepares_own_inputs(model):
        return False
    if len({parameter.device for parameter in model.parameters()} | {model.device}) > 1 or model.device.type == "meta":
        return False  # spread over devices or offloaded: one step's indices and masks lie on one device
    layer_types = getattr(config, "layer_types", None)
    if not set(layer_types or ()) <= {"full_attention", "sliding_attention"}:
        return False  # chunked attention and the like: the probe's texts are too short to tell
    if model.config.model_type in TESTED_MODEL_TYPES and type(model).__module__.startswith("transformers."):
        return True
    if not layer_types and any(getattr(config, name, None) is not None for name in WINDOWS):
        return False  # likewise: the window may be known to the model's own masks only
    if model not in _probed:
        _probed[model] = _probe(model)
    return _probed[model]


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    """Compares a packed forward of two ragged rows with a tree against plain forwards of every path."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompts = [np.arange(1, 8) % vocab_size, np.arange(3, 6) % vocab_size]
    tree = DraftTree(np.arange(4) % vocab_size, np.array([-1, -1, 0, 1]), np.ones(4, np.float32))
    paths = [[], [0], [1], [0, 2], [1, 3]]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        packed = PackedForward(model, num_rows=2, capacity=16)
        rows = [packed.add() for _ in prompts]
        logits, offsets = packed.forward([RowInput(row, prompt, tree) for row, prompt in zip(rows, prompts)])
        for prompt, offset in zip(prompts, offsets):
            for line, path in enumerate(paths):
                ids = torch.from_numpy(np.concatenate([prompt, tree.tokens[path]]))[None].to(logits.device)
                expected = model(input_ids=ids).logits[0, -1].float()
                error = (logits[offset + line].float() - expected).abs().max()
                if not error <= (0.1 if logits.dtype != torch.float32 else 1e-3) * expected.std():
                    return False
        return True
    except Exception:  # whatever goes wrong in a foreign model: it cannot be packed
        return False
    finally:
        for module, mode in modes:
            module.training = mode
