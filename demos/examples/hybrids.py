"""
A hybrid, whose layers keep states in place of keys and values: a small Qwen3.5 with random weights, and a draft model.

    python demos/examples/hybrids.py
"""

import copy
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import hf_smartspec

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip


def main() -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how many forwards these took."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)).eval()
    model.generation_config.pad_token_id = 0
    draft = copy.deepcopy(model)  # in place of a smaller model of the family
    inputs = {"input_ids": torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]]), "attention_mask": torch.ones(2, 4)}
    inputs["attention_mask"][0, 0] = 0
    plain = model.generate(**inputs, max_new_tokens=24).tolist()

    hf_smartspec.enable(model, assistant=hf_smartspec.SmartSpecConfig(draft, num_nodes=4))  # the line
    fast = model.generate(**inputs, max_new_tokens=24).tolist()
    statistics = model.smartspec_statistics.total
    print(f"The same without speculation: {plain == fast}. {statistics.forwards} forwards for 24 tokens.")

    # Continuous batching, which transformers refuses for such models.
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    batched = model.generate_batch(prompts, GenerationConfig(max_new_tokens=24, eos_token_id=None))
    answers = [output.generated_tokens for output in batched.values()]
    print(f"The same in a batch that others may join: {answers == [row[4:] for row in plain]}.")
    return [plain, [row[4:] for row in plain]], [fast, answers], statistics


if __name__ == "__main__":
    main()
