"""GRPO by TRL with `use_transformers_continuous_batching`: rollouts are drafted, and nothing else changes."""

import copy

import pytest
import torch

import hf_smartspec

from ...covering import exhaustive
from ...generate.helpers import EOS, VOCAB_SIZE, set_special_tokens, tiny_llama, tiny_tokenizer
from ...models import RECURRENT, new_model

pytest.importorskip("trl")


def recurrent():
    """A model that transformers does not batch."""
    model = new_model("qwen3_next", vocab_size=VOCAB_SIZE)
    return set_special_tokens(model.requires_grad_(True), EOS)


def train(folder, policy, assistant):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=12,
        max_steps=2,
        learning_rate=0.02,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_transformers_continuous_batching=True,
    )
    trainer = GRPOTrainer(
        model=hf_smartspec.enable(policy, assistant=assistant),
        reward_funcs=lambda completions, **_: [float(item.count("a") + len(item) / 10) for item in completions],
        args=options,
        train_dataset=Dataset.from_list([{"prompt": "abcab"}, {"prompt": "xyzxyzxyz"}]),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that TRL still uses
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("new_policy", [tiny_llama, *exhaustive(*[(recurrent,)] * bool(RECURRENT))])
def test_training_does_not_depend_on_what_drafts(new_policy, tmp_path, deprecated_by_itself):
    policy = new_policy()
    plain, fast = (train(tmp_path, copy.deepcopy(policy), name) for name in ("none", "suffix"))
    for trainer in (plain, fast):
        assert trainer.model.smartspec_statistics.num_calls == 2  # steps: all rollouts went through an engine
        assert trainer.model.training
    assert plain.model.smartspec_statistics.total.drafted_tokens == 0
    assert fast.model.smartspec_statistics.total.drafted_tokens > 0
    losses = [[item["loss"] for item in trainer.state.log_history if "loss" in item] for trainer in (plain, fast)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert all(torch.equal(*pair) for pair in zip(plain.model.parameters(), fast.model.parameters()))
    assert not torch.equal(plain.model.lm_head.weight, policy.lm_head.weight)
