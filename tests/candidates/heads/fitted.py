"""Drafters that know some texts. But for MTP layers, without training: all but their outputs is zero or random."""

import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_smartspec import BlockDrafter, MedusaHeads, MtpLayers
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.mlp_speculator import MLPSpeculator
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.drafters.blocks import BlockForward
from hf_smartspec.target_model.drafters.features import FeatureForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.training.eagle import EagleTraining, new_heads
from hf_smartspec.training.target import target_states

from .blocks.published import random_drafter, z_lab

_SURE = 10.0  # the least-squares fit to 0 and 1 is no logit


@torch.no_grad()
def fitted_heads(model: PreTrainedModel, texts: torch.Tensor, num_heads: int = 3) -> MedusaHeads:
    """Heads whose outputs are the least-squares fit to what comes so many places later in texts `[n, length]`."""
    states = model.base_model(texts, attention_mask=torch.ones_like(texts)).last_hidden_state
    outputs = [
        _fit(states[:, : texts.shape[1] - ahead], texts[:, ahead:], model.config.vocab_size)
        for ahead in range(2, num_heads + 2)
    ]
    size = outputs[0].shape[1]
    return MedusaHeads([[(torch.zeros(size, size), None)] for _ in outputs], outputs)


@torch.no_grad()
def fitted_speculator(
    model: PreTrainedModel, texts: torch.Tensor, num_steps: int = 3, inner: int = 64
) -> MLPSpeculator:
    """A random recurrent net, whose outputs are the least-squares fit to what comes in texts `[n, length]`."""
    generator = torch.Generator().manual_seed(0)
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    projections = [torch.randn(inner, size, generator=generator) / size**0.5 for size in (hidden, inner)]
    parts = {
        "emb.weight": [torch.randn(vocab, inner, generator=generator)],
        "proj.weight": projections,
        "ln.weight": [torch.ones(inner)],
        "ln.bias": [torch.zeros(inner)],
        "head.weight": [torch.zeros(vocab, inner) for _ in range(num_steps)],
    }
    speculator = MLPSpeculator(parts, num_steps)
    states = model.base_model(texts, attention_mask=torch.ones_like(texts)).last_hidden_state
    num = texts.shape[1] - num_steps - 1  # texts are known so far behind these places
    found = states[:, :num].flatten(0, 1)
    for step in range(num_steps):
        found, _ = speculator(texts[:, step + 1 : step + 1 + num].flatten(), found, step)
        output = _fit(found, texts[:, step + 2 : step + 2 + num], vocab)
        speculator.parts["head_weight"][step].copy_(output)
    return speculator


@torch.no_grad()
def fitted_eagle(model: PreTrainedModel, texts: torch.Tensor, num_steps: int = 3) -> EagleHeads:
    """Random heads of EAGLE-3, whose output is the least-squares fit to what comes in texts `[n, length]`."""
    heads, size = new_heads(model), model.config.hidden_size
    output = heads.part("lm_head")
    output.weight = torch.nn.Parameter(torch.eye(size), requires_grad=False)  # shows what it is multiplied with
    training = EagleTraining(model, heads, num_steps)
    states, _ = target_states(model, heads.hidden_layers, texts)
    x, tokens = [], []
    for step, (found, where) in enumerate(training._drafts(texts, texts, states)):
        x.append(found)
        tokens.append(texts[:, step + 2 :][where[:, :-1]])
    output.weight.data = _fit(torch.cat(x), torch.cat(tokens), model.config.vocab_size)
    return heads.requires_grad_(False)


@torch.no_grad()
def fitted_parallel(model: PreTrainedModel, texts: torch.Tensor, num_depths: int = 4) -> EagleHeads:
    """Random heads of P-EAGLE, whose output is the least-squares fit to what comes in texts `[n, length]`."""
    heads, size, mask_token = new_heads(model), model.config.hidden_size, 2
    num_numbers = size * len(heads.hidden_layers)
    mask_hidden = torch.randn(1, 1, num_numbers, generator=torch.Generator().manual_seed(0))
    heads.config.mask_token_id, heads.config.para_depths = mask_token, num_depths
    heads = EagleHeads(heads.config, heads._tensors() | {"mask_hidden": mask_hidden}, heads.hidden_layers, model)
    output = heads.part("lm_head")
    output.weight = torch.nn.Parameter(torch.eye(size))  # shows what it is multiplied with
    states, _ = target_states(model, heads.hidden_layers, texts)
    masks = heads.mask_hidden.expand(num_depths - 1, -1)
    chain = DraftTree.chain([mask_token] * (num_depths - 1))
    forward, x, tokens = FeatureForward(heads), [], []
    for text, known in zip(texts, states):
        ends = range(4, len(text) - num_depths + 1)
        rows = [
            RowInput(forward.add(), text[1:end].numpy(), chain, features=torch.cat([known[: end - 1], masks]))
            for end in ends
        ]
        found, offsets = forward.forward(rows)
        x += [found[offset : offset + num_depths] for offset in offsets]
        tokens += [text[end : end + num_depths] for end in ends]
    output.weight = torch.nn.Parameter(_fit(torch.cat(x), torch.cat(tokens), model.config.vocab_size))
    return heads.requires_grad_(False)


@torch.no_grad()
def fitted_blocks(model: PreTrainedModel, texts: torch.Tensor, **options) -> BlockDrafter:
    """A random block drafter, whose output is the least-squares fit to what comes in texts `[n, length]`."""
    vocab, size = model.config.vocab_size, model.config.hidden_size
    published = random_drafter(size, vocab, outputs=(-1, 0), **options)
    published.tensors["lm_head.weight"] = torch.zeros(vocab, size)
    with tempfile.TemporaryDirectory() as folder:
        z_lab(published, vocab, Path(folder))
        drafter = BlockDrafter.from_pretrained(folder, model)
    known = model(texts, attention_mask=torch.ones_like(texts), output_hidden_states=True).hidden_states
    states, forward = torch.cat([known[layer] for layer in drafter.hidden_layers], dim=-1), BlockForward(drafter)
    rows, x, tokens = [forward.add() for _ in texts], [], []
    for start in range(3, texts.shape[1] - drafter.block_size, 2):
        first = rows[0].length
        pieces = zip(rows, texts[:, first:start].numpy(), states[:, first:start])
        forward.forward([RowInput(row, feed, features=own) for row, feed, own in pieces])
        hidden = forward.blocks(rows, texts[:, start].tolist(), drafter.block_size)[:, drafter.first_slot :]
        x.append(hidden[:, : drafter.num_depths].flatten(0, 1))
        tokens.append(texts[:, start + 1 : start + 1 + drafter.num_depths].flatten())
    drafter.lm_head.weight.data = _fit(torch.cat(x), torch.cat(tokens), vocab)
    return drafter


def fitted_mtp(target: PreTrainedModel, texts: torch.Tensor, padding: int = 0, num_steps: int = 60) -> MtpLayers:
    """
    The target's MTP layers, taught what comes in texts `[n, length]`, behind `padding`; each layer
    goes on from the one before.
    """
    layers = MtpLayers.from_pretrained("mtp", target)
    model = layers.packed.model
    with torch.no_grad():
        mask = (texts != padding).cummax(dim=1).values.long()
        states = target.base_model(texts, attention_mask=mask).last_hidden_state[:, :-1]
        embedded = target.get_input_embeddings()(texts[:, 1:])
    for number, block in enumerate(layers.blocks):
        first = number + 1  # token that it begins with
        kind = [model.config.layer_types[number]] if model.has_per_layer_rope else []
        rotary = model.rotary_emb(embedded, torch.arange(first, texts.shape[1])[None], *kind)
        optimizer = torch.optim.Adam(block.requires_grad_(True).parameters(), lr=5e-3)
        for _ in range(num_steps):
            hidden = block(embedded, states, rotary, None, None, None)
            logits = layers.packed.logits(hidden[:, :-1].flatten(0, 1))
            torch.nn.functional.cross_entropy(logits, texts[:, first + 1 :].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        embedded, states = embedded[:, 1:], hidden[:, :-1].detach()
    layers.blocks.requires_grad_(False)
    return layers


def _fit(x: torch.Tensor, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The output weight `[vocab, n]` that fits tokens to vectors `[..., n]`."""
    wanted = torch.nn.functional.one_hot(tokens.flatten(), vocab_size).float()
    return _SURE * torch.linalg.lstsq(x.flatten(0, -2), wanted, driver="gelsd").solution.T
