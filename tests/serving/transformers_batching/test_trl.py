"""GRPO by TRL with `use_transformers_continuous_batching`: rollouts are drafted, and nothing else changes."""

import pytest
import torch

import hf_smartspec

from ...generate.helpers import tiny_llama, tiny_tokenizer

pytest.importorskip("trl")


def train(folder, assistant):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    policy = hf_smartspec.enable(tiny_llama(), assistant=assistant)
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
        model=policy,
        reward_funcs=lambda completions, **_: [float(item.count("a") + len(item) / 10) for item in completions],
        args=options,
        train_dataset=Dataset.from_list([{"prompt": "abcab"}, {"prompt": "xyzxyzxyz"}]),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that TRL still uses
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_does_not_depend_on_what_drafts(tmp_path, deprecated_by_itself):
    plain, fast = (train(tmp_path, name) for name in ("none", "suffix"))
    for trainer in (plain, fast):
        assert trainer.model.smartspec_statistics.num_calls == 2  # steps: all rollouts went through an engine
        assert trainer.model.training
    assert plain.model.smartspec_statistics.total.drafted_tokens == 0
    assert fast.model.smartspec_statistics.total.drafted_tokens > 0
    losses = [[item["loss"] for item in trainer.state.log_history if "loss" in item] for trainer in (plain, fast)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert all(torch.equal(*pair) for pair in zip(plain.model.parameters(), fast.model.parameters()))
    assert not torch.equal(plain.model.lm_head.weight, tiny_llama().lm_head.weight)
