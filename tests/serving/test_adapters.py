"""An engine on a model whose adapters change: nothing of what was computed with others is used again."""

from itertools import pairwise

import pytest

from hf_smartspec import Engine

from ..generate.helpers import tiny_llama
from .helpers import Asked, check_all, suffix

peft = pytest.importorskip("peft", reason="peft is not installed")
CONFIG = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
ASKED = Asked([5, 9, 12, 5, 9, 12, 5, 9, 30, 31, 32, 5, 9], {"max_new_tokens": 16, "eos_token_id": None})


def scaled(wrapped):
    for layer in wrapped.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.2)


# In this order, since each begins with what the one before it has left.
CHANGES = {
    "added": lambda wrapped: wrapped.add_adapter("b", CONFIG),
    "switched": lambda wrapped: wrapped.set_adapter("b"),
    "scaled": scaled,
    "merged, another than the active": lambda wrapped: wrapped.merge_adapter(["a"]),
    "unmerged": lambda wrapped: wrapped.unmerge_adapter(),
    "switched off": lambda wrapped: wrapped.base_model.disable_adapter_layers(),
    "switched on": lambda wrapped: wrapped.base_model.enable_adapter_layers(),
    "merged for good": lambda wrapped: wrapped.merge_and_unload(),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:Already")
def test_texts_computed_with_other_adapters_are_forgotten():
    model = tiny_llama()
    outputs = [ASKED.alone(model)]
    with Engine(model, suffix(), max_batch_size=4) as engine:
        check_all(engine, model, [ASKED])
        wrapped = peft.get_peft_model(model, CONFIG, adapter_name="a").eval()
        for name, change in {"first": lambda wrapped: None, **CHANGES}.items():
            change(wrapped)
            reused = engine._memory.num_reused
            check_all(engine, model, [ASKED])
            assert engine._memory.num_reused == reused or name == "added", f"{name}: computed with other weights"
            check_all(engine, model, [ASKED])
            assert engine._memory.num_reused > reused, f"{name}: nothing has changed since"
            outputs.append(ASKED.alone(model))
        assert engine.statistics.accepted_tokens > 0
    assert sum(before != after for before, after in pairwise(outputs)) >= 5, "adapters make a difference"
