"""Block drafters learn from blocks at random anchors, by what they will draft there."""

import math
from dataclasses import replace

import pytest
import torch

import hf_smartspec
from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter
from hf_smartspec.training import blocks, loop
from hf_smartspec.training.blocks import BlockTraining
from hf_smartspec.training.checkpoints import newest_checkpoint
from hf_smartspec.training.loop import Schedule, train
from hf_smartspec.training.new_blocks import new_drafter, unused_token
from hf_smartspec.training.texts import IGNORED, Text, collate

from ..candidates.heads.blocks.published import markov_step
from ..candidates.heads.by_heart import texts_of as answers_of
from ..generate.helpers import prompts, tiny_llama
from ..models import new_model
from .test_medusa import MAX_LENGTH, texts_of

KINDS = ("dflash", "dspark")
HEADS = ("vanilla", "gated", "rnn")


@pytest.fixture
def target():
    return new_model("llama")


def shaken(target, kind="dflash", **options) -> BlockDrafter:
    """A new drafter whose weights are all unlike what it begins as."""
    drafter = new_drafter(target, 96, kind, **{"block_size": 4, "num_layers": 2, "neurons": 24} | options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return drafter


@torch.no_grad()
def block_at(target, drafter: BlockDrafter, ids: torch.Tensor, anchor: int) -> tuple:
    """
    Logits `[depths, own vocab]` of the block at a place of a text `[n]`, as drafting computes them there, and DSpark's
    confidence `[depths]`.
    """
    states = target(ids[None, :anchor], output_hidden_states=True).hidden_states
    combined = drafter.combine(torch.cat([states[layer][0] for layer in drafter.hidden_layers], dim=1))
    text, slots = torch.arange(anchor), anchor + torch.arange(drafter.block_size)
    hidden = drafter.embed(ids[anchor : anchor + 1], drafter.block_size)
    for layer in drafter.layers:
        held = layer.context(combined, drafter.rotation(text))

        def attend(queries, keys, values, sinks, layer=layer, held=held):
            assert sinks is None
            keys, values = (torch.cat([item, own[0]]) for item, own in zip(held, (keys, values)))
            seen, found = layer.sees(slots, torch.cat([text, slots])), torch.zeros_like(queries)
            groups = queries.shape[2] // keys.shape[1]
            for slot, head in torch.cartesian_prod(*map(torch.arange, queries.shape[1:3])).tolist():
                scores = keys[:, head // groups] @ queries[0, slot, head] / math.sqrt(queries.shape[3])
                weights = scores.masked_fill(~seen[slot], -torch.inf).softmax(0)
                found[0, slot, head] = weights @ values[:, head // groups]
            return found

        hidden = layer(hidden, drafter.rotation(slots[None]), attend)
    hidden = drafter.norm(hidden)[0, drafter.first_slot :]
    logits = drafter.logits(hidden)
    if drafter.label == "dspark":  # with right tokens before each slot
        tokens = ids[anchor : anchor + drafter.num_depths]
        before, own = drafter.markov_head.markov_w1.weight[tokens], hidden[: len(tokens)]
        tensors, state, added = drafter.markov_head.state_dict(), torch.zeros(before.shape[1]), []
        for token, h in zip(tokens, own):
            vector, state = markov_step(tensors, token, state, h)
            added.append(vector)
        logits, proj = logits[: len(tokens)] + torch.stack(added), drafter.confidence_head.proj
        return logits, torch.sigmoid(torch.cat([own, before], 1) @ proj.weight[0] + proj.bias)
    return logits, None


@pytest.mark.parametrize(
    ("kind", "own_vocab", "markov_head"),
    [("dflash", None, "vanilla"), ("dflash", 70, "vanilla"), *(("dspark", 70, head) for head in HEADS)],
)
def test_the_loss_is_that_of_blocks_one_by_one(target, kind, own_vocab, markov_head):
    token_ids = None if own_vocab is None else torch.arange(own_vocab) + 20
    drafter = shaken(target, kind, token_ids=token_ids, markov_head=markov_head)
    module = BlockTraining(target, drafter, num_blocks=5, seed=3)
    texts = texts_of(3)
    texts[1] = Text(texts[1].prompt, texts[1].response[:2])  # beside padding, with fewer places than blocks
    batch = collate([item.example(MAX_LENGTH) for item in texts])
    anchors = module._anchors(batch["labels"], 1, torch.Generator().manual_seed(3))
    assert (anchors >= 0).sum(1).tolist() == [5, 2, 5]
    loss = weight = 0.0
    for text, own in zip(texts, anchors.tolist()):
        ids = torch.tensor([*text.prompt, *text.response])
        with torch.no_grad():
            known = target(ids[None]).logits[0]
        for anchor in filter(lambda place: place >= 0, own):
            assert anchor + 1 >= len(text.prompt)
            block, confidence = block_at(target, drafter, ids, anchor)
            for depth, logits in enumerate(block):
                if (place := anchor + 1 + depth) < len(ids):
                    own_ids, share = torch.arange(97) if token_ids is None else token_ids, math.exp(-depth / 2)
                    wanted = known[place - 1][own_ids].softmax(-1) * bool(ids[place] in own_ids)
                    loss -= share * (wanted * logits.log_softmax(-1)).sum().item()
                    if confidence is not None:
                        overlap = torch.minimum(wanted, logits.softmax(-1)).sum().item()
                        found = confidence[depth].item()
                        loss -= share * (overlap * math.log(found) + (1 - overlap) * math.log(1 - found))
                    weight += share
    assert module(**batch)["loss"].item() == pytest.approx(loss / weight, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_few_logits_are_kept_at_a_time(target, kind, monkeypatch):
    """
    In pieces of the slots, with the same loss, gradients and measures. Slots of one place are in the same piece, or in
    two: the target's probabilities there are computed once for each.
    """
    texts = texts_of(4)
    batch = collate([item.example(MAX_LENGTH) for item in texts])

    def run():
        module = BlockTraining(target, shaken(target, kind, markov_head="rnn"), num_blocks=20)
        loss = module(**batch)["loss"]
        loss.backward()
        grads = {name: item.grad for name, item in module.drafter.named_parameters() if item.grad is not None}
        return [loss, *grads.values()], list(grads), module.accuracy(texts, MAX_LENGTH), module

    counts, logits, asked, target_probs = [], BlockDrafter.logits, [], blocks.target_probs
    monkeypatch.setattr(blocks, "target_probs", lambda *args: asked.append(len(args[3])) or target_probs(*args))
    whole, names, accuracy, module = run()
    monkeypatch.setattr(blocks, "_MOST_LOGITS", 5 * 97 + 3)
    monkeypatch.setattr(BlockDrafter, "logits", lambda *args: counts.append(len(args[1])) or logits(*args))
    pieces, same, again, other = run()
    num_places, *asked = asked
    num_pieces = len(asked) // 2  # and again for gradients
    assert sum(asked[:num_pieces]) < num_places + num_pieces
    assert max(counts) == 5 and len(counts) > 20 and same == names and again == accuracy
    assert other.accepted_length(texts, MAX_LENGTH) == module.accepted_length(texts, MAX_LENGTH)
    for one, two in zip(whole, pieces):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def test_confidence_that_is_too_sure_is_unlearnt_beside_a_target_in_half_precision():
    """In bfloat16, 0.999 is 1."""
    target = new_model("llama", dtype=torch.bfloat16)
    module = BlockTraining(target, shaken(target, "dspark"), num_blocks=5)
    bias = module.drafter.confidence_head.proj.bias
    with torch.no_grad():
        module.drafter.confidence_head.proj.weight.zero_()
        bias.fill_(7.0)
    loss = module(**collate([item.example(MAX_LENGTH) for item in texts_of(3)]))["loss"]
    loss.backward()
    assert loss.isfinite() and bias.grad > 0.1


def test_anchors_are_drawn_anew_in_each_update(target):
    module = BlockTraining(target, shaken(target), num_blocks=6)
    labels = collate([item.example(MAX_LENGTH) for item in texts_of(40)])["labels"]
    draws = [module._anchors(labels, 1, torch.Generator().manual_seed(number)) for number in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    for own in draws[0].tolist():
        assert len(set(own)) == 6, "without repetition"
    assert set(draws[0].flatten().tolist()) == set(range(3, 23)), "from the prompt's last token to the last but one"
    whole = module._anchors(labels, 3, torch.Generator().manual_seed(0))
    assert set(whole.flatten().tolist()) == set(range(3, 21))
    batch = collate([item.example(MAX_LENGTH) for item in texts_of(4)])
    losses = [module(**batch)["loss"].item() for _ in range(3)]
    assert len(set(losses)) == 3
    module.num_updates.zero_()
    assert module(**batch)["loss"].item() == losses[0]


def test_accepted_tokens_are_counted_as_a_loop_does(target):
    module = BlockTraining(target, shaken(target), num_blocks=50)
    with torch.no_grad():
        for parameter in module.drafter.layers.parameters():
            parameter.mul_(0.1)
    texts, counts, hits = texts_of(5), [], torch.zeros(3)
    for text in texts:
        ids = torch.tensor([*text.prompt, *text.response])
        for anchor in range(len(text.prompt) - 1, len(ids) - 3):
            wanted = ids[anchor + 1 : anchor + 4]
            logits, _ = block_at(target, module.drafter, ids, anchor)
            counts.append(int((logits.argmax(-1) == wanted).long().cumprod(0).sum()))
            hits += (logits.topk(8).indices == wanted[:, None]).any(1)
    assert module.accepted_length(texts, MAX_LENGTH, 2) == pytest.approx(sum(counts) / len(counts))
    found = [item[8] for item in module.accuracy(texts, MAX_LENGTH, 2)]
    assert found == pytest.approx((hits / len(counts)).tolist(), abs=1e-6) and hits.sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_learnt_until_they_are_accepted(kind, tmp_path):
    """And saved in the authors' form, from which they draft what plain decoding says."""
    target = tiny_llama(eos_token_id=None)
    target.generation_config.eos_token_id = None
    before = {name: item.clone() for name, item in target.state_dict().items()}
    inputs = prompts((9, 5, 12))
    texts = answers_of(target, inputs, 32)
    mask_token = unused_token(texts, target.config.vocab_size)
    drafter = new_drafter(target, mask_token, kind, block_size=5 if kind == "dflash" else 4, num_layers=2, neurons=64)
    module = BlockTraining(target, drafter, num_blocks=32)
    begun = module.accepted_length(texts, 64)
    schedule = Schedule(steps=110, batch_size=3, max_length=64, learning_rate=1.5e-2)
    train(module, texts, tmp_path / "checkpoints", schedule)
    assert all(torch.equal(item, before[name]) for name, item in target.state_dict().items())
    learnt = module.accepted_length(texts, 64)
    assert begun < 1 and learnt > 0.8 * drafter.num_depths
    module.drafter.save_pretrained(tmp_path / "drafter")
    found = BlockDrafter.from_pretrained(tmp_path / "drafter", target)
    assert found.label == kind and found.num_depths == 4
    assert BlockTraining(target, found).accepted_length(texts, 64) == learnt


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_ends_with_the_same_weights(target, kind, tmp_path, monkeypatch):
    schedule, texts = Schedule(steps=8, batch_size=4, max_length=MAX_LENGTH), texts_of(24)

    def new():
        return BlockTraining(target, shaken(target, kind), num_blocks=4)

    whole = new()
    train(whole, texts, tmp_path / "whole", schedule)
    forward, calls = BlockTraining.forward, []

    def failing(self, input_ids, labels):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return forward(self, input_ids, labels)

    monkeypatch.setattr(loop, "SAVE_SECONDS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(BlockTraining, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            train(new(), texts, tmp_path / "parts", schedule)
    resumed = new()
    train(resumed, texts, tmp_path / "parts", schedule, newest_checkpoint(tmp_path / "parts"))
    assert int(resumed.num_updates) == int(whole.num_updates) == 8
    for name, item in whole.drafter.state_dict().items():
        assert torch.equal(resumed.drafter.state_dict()[name], item), name


def test_new_drafters_begin_as_the_targets_last_layers(target):
    texts = texts_of(3)
    drafter = new_drafter(target, unused_token(texts, 97), block_size=6, num_layers=2)
    decoder = target.get_decoder()
    for own, other in zip(drafter.layers, decoder.layers):
        assert torch.equal(own.self_attn["v_proj"].weight, other.self_attn.v_proj.weight)
        assert torch.equal(own.mlp["down_proj"].weight, other.mlp.down_proj.weight)
    assert drafter.hidden_layers == (1,) and drafter.block_size == 6 and drafter.num_depths == 5
    assert drafter.spec.mask_token == 96, "in no text"
    assert unused_token([Text(torch.arange(90, 97).numpy(), texts[0].response)], 97) == 89
    dspark = new_drafter(target, 96, "dspark", block_size=6, num_layers=2)
    assert dspark.label == "dspark" and dspark.num_depths == 6 and dspark.markov_head.kind == "vanilla"
    assert not dspark.markov_head.markov_w2.weight.any(), "it begins as DFlash"
    again = new_drafter(target, 96, block_size=6, num_layers=2, seed=1)
    assert not torch.equal(drafter.fc.weight, again.fc.weight)


def test_what_cannot_be_trained_is_refused(target):
    drafter = shaken(target)
    module = BlockTraining(target, drafter)
    short = collate([Text(torch.tensor([3]).numpy(), torch.tensor([5]).numpy()).example(MAX_LENGTH)])
    short["labels"][:] = IGNORED
    loss = module(**short)["loss"]
    loss.backward()
    assert loss.item() == 0.0, "there is nothing to learn"
    other = shaken(target, "dspark")
    other.spec = replace(other.spec, has_sinks=(True, False))
    with pytest.raises(ValueError, match="cannot be trained: dspark with sinks"):
        BlockTraining(target, other)
    drafter.hidden_layers = (2,)
    with pytest.raises(ValueError, match=r"\(2,\) of 2"):
        BlockTraining(target, drafter)
    with pytest.raises(ValueError, match="quantized"):
        new_drafter(hf_smartspec.quantize(target), 96)
