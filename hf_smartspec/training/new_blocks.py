"""Block drafters that are not trained yet."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..candidates.heads.blocks.config import DSPARK, default_layers, read_config
from ..candidates.heads.blocks.drafter import BlockDrafter
from ..candidates.heads.blocks.scores import VANILLA
from .target import CALM, MAPS, NOISE, layer_config, layer_weights, norm_weight, output_weight
from .texts import Text

_MOST_RANK = 256  # of DSpark's Markov head, as in published files


def new_drafter(
    target: PreTrainedModel,
    mask_token: int,
    kind: str = "dflash",
    *,
    block_size: int = 8,
    num_layers: int = 5,
    neurons: int | None = None,
    token_ids: torch.Tensor | None = None,
    markov_head: str = VANILLA,
    seed: int = 0,
) -> BlockDrafter:
    """
    Return an untrained block drafter in float32, with the target's attention heads, embeddings and output. Where the
    target's last layers are a Llama's, its own begin as they are.

    Args:
        mask_token (`int`): Token in all slots but the first, such as `unused_token`.
        kind (`str`): "dflash" or "dspark".
        block_size (`int`): Slots of a block, the anchor's included.
        num_layers (`int`): Layers of the drafter, and, at most, hidden states of the target that it reads.
        neurons (`int`, *optional*): Intermediate size of the MLP; the target's by default.
        token_ids (`torch.Tensor` of shape `[own vocab]`, *optional*): Tokens that it may draft, ascending, from an
            output of its own; all by default, from the target's.
        markov_head (`str`): DSpark's: "vanilla", "gated" or "rnn".
        seed (`int`): Seed of the weights. torch's global generators are not used.

    Raises:
        ValueError: for a target whose output layer is quantized.
    """
    output, sizes = output_weight(target), layer_config(target, neurons, num_layers)
    num = target.config.get_text_config(decoder=True).num_hidden_layers
    layers = sorted({min(max(layer, 1), num - 1) for layer in default_layers(num, num_layers)})
    own = {"mask_token_id": mask_token, "target_layer_ids": [layer - 1 for layer in layers]}
    if kind == DSPARK:
        own |= {"markov_rank": min(_MOST_RANK, sizes.hidden_size), "markov_head_type": markov_head}
        own |= {"enable_confidence_head": True}
    num_tokens = sizes.vocab_size if token_ids is None else len(token_ids)
    entries = sizes.to_dict() | {"block_size": block_size, "draft_vocab_size": num_tokens, f"{kind}_config": own}
    spec = read_config(entries, {}, None, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tensors = BlockDrafter(spec, None, target).state_dict()
    _copy_last_layers(tensors, target, num_layers)
    if kind == DSPARK:  # which begins as DFlash
        tensors["markov_head.markov_w2.weight"].zero_()
    if token_ids is not None:
        tensors["lm_head.weight"] = output[token_ids].float().cpu()
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    return BlockDrafter(spec, tensors, target).to(output.device)


def _copy_last_layers(tensors: dict[str, torch.Tensor], target: PreTrainedModel, num_layers: int) -> None:
    """
    Replace random weights by those of the target's final norm and last layers, as far as their shapes are the same, if
    these are a Llama's: the context begins as the last hidden state that the drafter reads.
    """
    size = len(tensors["norm.weight"])
    for layer in range(num_layers):
        weights = layer_weights(target, layer - num_layers)
        for name, found in weights.items():
            place = f"layers.{layer}.{MAPS.get(name, name)}.weight"
            if tensors[place].shape == found.shape:
                tensors[place] = found.clone()
    if weights:
        tensors["norm.weight"] = CALM * norm_weight(target)
        tensors["hidden_norm.weight"] = weights["input_layernorm"].clone()
        fc = tensors["fc.weight"].mul_(NOISE)
        fc[:, -size:] += torch.eye(size)


def unused_token(texts: Sequence[Text], vocab_size: int) -> int:
    """Return the last token that no text has; the last of all where texts have them all."""
    seen = np.zeros(vocab_size, bool)
    for text in texts:
        seen[text.prompt], seen[text.response] = True, True
    return int(np.flatnonzero(~seen)[-1]) if not seen.all() else vocab_size - 1
