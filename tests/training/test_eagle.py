"""Heads of EAGLE-3 learn by what they will draft, and the target stays as it is."""

import re

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import hf_smartspec
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.drafters.features import FeatureForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.training.checkpoints import newest_checkpoint
from hf_smartspec.training.eagle import EagleTraining, frequent_tokens, new_heads
from hf_smartspec.training.loop import Schedule, train
from hf_smartspec.training.target import target_probs, target_states
from hf_smartspec.training.texts import Text, collate

from ..candidates.heads.published_eagle import random_heads
from ..covering import exhaustive
from ..models import new_model
from .test_medusa import MAX_LENGTH, texts_of

NUM_STEPS = 3


@pytest.fixture
def target():
    return new_model("llama")


def random_eagle(target, **options) -> EagleHeads:
    sizes = target.config.hidden_size, target.config.vocab_size
    published = random_heads(*sizes, third=True, layers=(0, 1, 1), own_vocab=70, **options)
    config = LlamaConfig(
        hidden_size=sizes[0], intermediate_size=sizes[0] + 8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=published.head_dim, norm_before_residual=published.norm_before_residual,
        norm_output=published.norm_output, num_hidden_layers=published.num_layers,
    )  # fmt: skip
    tensors = {re.sub(r"^(\d)\.(\w+)", r"\2_\1", name): item for name, item in published.tensors.items()}
    tensors = {name.replace("fc_norm.", "fc_norm_"): item for name, item in tensors.items()}
    return EagleHeads(config, tensors | {"d2t": published.token_ids - torch.arange(70)}, (0, 1, 1), target)


HEADS = {
    "plain": {},
    "norms": {"has_norms": True, "head_dim": 16},
    "norm before": {"has_input_norm": True, "norm_before_residual": True},
    "two layers": {"num_layers": 2, "has_fc_norm": True, "norm_output": True},
}


@torch.no_grad()
def drafted(target, heads, text: Text) -> list[list[tuple[int, torch.Tensor]]]:
    """
    Of every step, what is drafted behind each token of a text from the prompt's last but one on: its place in the
    text, and the logits, as drafting computes them where the draft so far is right.
    """
    ids = torch.tensor([*text.prompt, *text.response])
    states = target(ids[None], output_hidden_states=True).hidden_states
    states = torch.cat([states[layer][0] for layer in heads.hidden_layers], dim=1)
    forward = FeatureForward(heads)
    found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(NUM_STEPS)]
    for start in range(max(len(text.prompt) - 2, 0), len(ids) - 2):
        row = forward.add()
        item = RowInput(row, ids[1 : start + 2].numpy(), features=states[: start + 1])
        for step in range(NUM_STEPS):
            if start + step + 2 >= len(ids):
                break
            logits, _ = forward.forward([item])
            found[step].append((start + step + 2, logits[-1]))
            tree = DraftTree.chain(ids[start + 2 : start + step + 3].numpy())
            item = RowInput(row, ids[:0].numpy(), tree, step, forward.hidden[-1:])
        forward.remove(row)
    return found


@pytest.mark.parametrize("kind", HEADS)
def test_what_is_learnt_from_is_what_will_be_drafted(target, kind):
    """The paper's training-time test: further steps take what the step before has left, and see their own chain."""
    heads = random_eagle(target, **HEADS[kind])
    module = EagleTraining(target, heads, NUM_STEPS)
    texts = texts_of(3)
    texts[1] = Text(texts[1].prompt, texts[1].response[:9])  # beside padding
    texts[2] = Text(texts[2].prompt[:3], texts[2].response)
    batch = collate([item.example(MAX_LENGTH) for item in texts])
    expected = [drafted(target, heads, text) for text in texts]
    losses = []
    with torch.no_grad():
        states, _ = target_states(target, heads.hidden_layers, batch["input_ids"])
        steps = list(module._drafts(batch["input_ids"], batch["labels"], states))
        for step, (logits, where) in enumerate(steps):
            wanted = [item for own in expected for item in own[step]]
            torch.testing.assert_close(logits, torch.stack([line for _, line in wanted]), rtol=1e-4, atol=2e-5)
            assert int(where.sum()) == len(wanted) > 30
            probs = []
            for text, own in zip(texts, expected):
                ids = torch.tensor([[*text.prompt, *text.response]])
                all_probs = target(ids).logits[0][:, heads.token_ids].softmax(-1)
                is_own = torch.isin(ids[0], heads.token_ids)
                probs += [all_probs[place - 1] * is_own[place] for place, _ in own[step]]
            losses.append(-(torch.stack(probs) * logits.log_softmax(-1)).sum(-1).mean())
    expected_loss = sum(0.8**step * loss for step, loss in enumerate(losses))
    torch.testing.assert_close(module(**batch)["loss"].detach(), expected_loss)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        *exhaustive(("cohere", {"logit_scale": 0.3}), ("granite", {"logits_scaling": 5.0})),
    ],
)
@torch.no_grad()
def test_probabilities_are_those_of_capped_and_scaled_logits(architecture, options):
    target, own = new_model(architecture, **options), torch.tensor([90, 3, 5, 40])
    text = torch.tensor([[9, 3, 40, 7, 90, 5]])
    _, hidden = target_states(target, (0,), text)
    logits, following = target(text).logits[0, :-1], text[0, 1:]
    assert not torch.allclose(target.get_output_embeddings()(hidden)[0, :-1], logits, atol=0.01)
    found = target_probs(target, None, hidden[0, :-1], following)
    torch.testing.assert_close(found, logits.softmax(-1))
    found = target_probs(target, own, hidden[0, :-1], following)
    expected = logits[:, own].softmax(-1) * torch.isin(following, own)[:, None]
    torch.testing.assert_close(found, expected)


def test_accuracy_is_what_is_counted_by_hand(target):
    heads = random_eagle(target)
    with torch.no_grad():
        heads.parts["lm_head"].weight.mul_(0.1)  # no draft is sure
    texts = texts_of(5)
    module = EagleTraining(target, heads, NUM_STEPS)
    expected = np.zeros((NUM_STEPS, 3))
    counts = np.zeros((NUM_STEPS, 1))
    for text in texts:
        ids = [*text.prompt.tolist(), *text.response.tolist()]
        for step, own in enumerate(drafted(target, heads, text)):
            for place, logits in own:
                best = heads.token_ids[logits.argsort(descending=True)].tolist()
                expected[step] += [ids[place] in best[:num] for num in (1, 3, 8)]
                counts[step] += 1
    found = module.accuracy(texts, MAX_LENGTH, batch_size=2)
    np.testing.assert_allclose([list(item.values()) for item in found], expected / counts, atol=1e-6)
    assert found[0].keys() == {1, 3, 8} and expected[:, 2].min() > 0


def test_frequent_tokens_are_those_of_responses():
    texts = [Text(np.array([1, 1, 1]), np.array([5, 3, 3, 8])), Text(np.array([1]), np.array([3, 8, 2]))]
    assert frequent_tokens(texts, 2, 10).tolist() == [3, 8]
    assert frequent_tokens(texts, 3, 10).tolist() == [2, 3, 8], "of equally frequent ones, the first"
    assert frequent_tokens(texts, 10, 10) is None


def test_heads_of_a_target_with_layer_norms_begin_with_ones():
    """A LayerNorm of ones is its bias."""
    parts = new_heads(new_model("stablelm")).parts
    assert all((parts[name].weight == 1).all() for name in ("norm", "hidden_norm", "post_attention_layernorm"))


def test_new_heads_are_of_the_targets_sizes(target):
    ids = torch.tensor([3, 9, 50])
    heads = new_heads(target, ids, neurons=24, seed=3)
    last = target.get_decoder().layers[-1]
    assert torch.equal(heads.part("o_proj").weight, last.self_attn.o_proj.weight), "they begin as the last layer"
    assert torch.equal(heads.part("q_proj").weight[:, target.config.hidden_size :], last.self_attn.q_proj.weight)
    assert torch.equal(heads.part("lm_head").weight, target.get_output_embeddings().weight[ids])
    assert heads.token_ids.tolist() == [3, 9, 50] and heads.config.intermediate_size == 24
    again, other = new_heads(target, ids, 24, seed=3), new_heads(target, ids, 24, seed=4)
    assert torch.equal(heads.part("fc").weight, again.part("fc").weight)
    assert not torch.equal(heads.part("fc").weight, other.part("fc").weight)


@pytest.mark.parametrize("architecture", ["gemma2", "phi", *exhaustive(["gpt2"], ["qwen3"])])
def test_heads_are_trained_for_any_decoder(architecture, tmp_path):
    """Whose embeddings may be scaled, and outputs have a bias; they are saved, and draft."""
    model = new_model(architecture, eos_token_id=None)
    model.generation_config.eos_token_id = None
    texts = texts_of(8)
    module = EagleTraining(model, new_heads(model, neurons=16), 2)
    train(module, texts, tmp_path / "checkpoints", Schedule(steps=4, batch_size=4, max_length=MAX_LENGTH))
    module.heads.save_pretrained(tmp_path / "heads")
    found = EagleHeads.from_pretrained(tmp_path / "heads", model)
    for name, item in module.heads.parts.state_dict().items():
        assert torch.equal(item, found.parts.state_dict()[name])
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with hf_smartspec.enabled(model):
        expected = model.generate(ids, **options, assistant="none")
        config = hf_smartspec.SmartSpecConfig(str(tmp_path / "heads"), num_nodes=3)
        output = model.generate(ids, **options, assistant=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > 12


def test_what_is_learnt_is_saved_loaded_and_resumed(target, tmp_path):
    before = {name: item.clone() for name, item in target.state_dict().items()}
    schedule = Schedule(steps=60, batch_size=8, max_length=MAX_LENGTH, learning_rate=1e-2)
    texts, held_out = texts_of(64), texts_of(16, seed=1)
    held_out = [Text(item.prompt, other.response) for item, other in zip(held_out, texts_of(16))]

    def new():
        return EagleTraining(target, new_heads(target, neurons=32), 2)

    module = new()
    begun = module.accuracy(held_out, MAX_LENGTH)
    loss = float(module(**collate([item.example(MAX_LENGTH) for item in held_out]))["loss"])
    train(module, texts, tmp_path / "checkpoints", schedule)
    assert float(module(**collate([item.example(MAX_LENGTH) for item in held_out]))["loss"]) < loss
    assert len(begun) == 2
    assert all(torch.equal(item, before[name]) for name, item in target.state_dict().items())
    resumed = new()
    train(resumed, texts, tmp_path / "checkpoints", schedule, newest_checkpoint(tmp_path / "checkpoints"))
    for name, item in module.heads.parts.state_dict().items():
        assert torch.equal(resumed.heads.parts.state_dict()[name], item), "there is nothing left to do"


def test_texts_that_are_too_short_teach_nothing(target):
    module = EagleTraining(target, new_heads(target, neurons=16), 2)
    loss = module(**collate([Text(np.array([3]), np.array([5])).example(MAX_LENGTH)]))["loss"]
    loss.backward()
    assert float(loss) == 0.0


def test_what_cannot_be_trained_is_refused(target):
    heads = random_eagle(target)
    heads.hidden_layers = (1, 1, 2)
    with pytest.raises(ValueError, match=r"\(1, 1, 2\) of 2"):
        EagleTraining(target, heads)
    with pytest.raises(ValueError, match="quantized"):
        new_heads(hf_smartspec.quantize(target))
