"""Cost-matched models: a small trained model at the cost of a large one, without a change of what it computes."""

import copy
import math
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

_HYBRID = "qwen3_5_text"
_MODEL_TYPES = ("llama", "mistral", _HYBRID)
_WRITE_RESIDUALS = ("embed_tokens.weight", "lm_head.weight", "o_proj.weight", "out_proj.weight", "down_proj.weight")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
_NORMS_OF_HEADS = ("q_norm", "k_norm", "linear_attn.norm")  # whose size stays
_WIDTH_STEP, _NEURON_STEP = 64, 16  # sizes are multiples of these, which matrix products like


class Sizes(NamedTuple):
    """Sizes of a model, under the names of `LlamaConfig` and, of linear attention, `Qwen3_5TextConfig`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0


def enlarge(model: PreTrainedModel, num_parameters: float = 200e6, seed: int = 0) -> PreTrainedModel:
    """
    Return a model of about `num_parameters` parameters with the output of `model`: real text at the cost of a real
    model of that size, in weights read, matrix products, attention and key-value cache (docs/design.md, "Cost-matched
    models").

    Layers, heads and neurons are added whose output projections are zero; their other weights are random. Layers of a
    hybrid go on in the order of its kinds, such as three of linear attention and one of attention. The residual
    stream gets further dimensions, which stay zero. RMSNorm averages over them too, so its weights shrink by
    sqrt(old / new) and its epsilon by old / new. Logits differ by rounding only. The vocabulary stays as it is: where
    it is small, the output layer has a smaller share of the cost than in real models.

    Args:
        model (`PreTrainedModel`): Of Llama's, Mistral's or Qwen3.5's architecture, without biases. Stays as it is.
        num_parameters (`float`): Tied embeddings count once. Met within 5 %.
        seed (`int`): Of the random weights. torch's global generators stay as they are.

    Returns:
        `PreTrainedModel` of the same class, dtype and device, in evaluation mode.

    Raises:
        ValueError: for another architecture, or fewer parameters than the model has, or no finite number.
    """
    sizes = find_sizes(model, num_parameters)
    config = copy.deepcopy(model.config)
    config.update({name: size for name, size in sizes._asdict().items() if size})
    if model.config.model_type == _HYBRID:
        kinds = model.config.layer_types
        config.layer_types = [kinds[layer % len(kinds)] for layer in range(sizes.num_hidden_layers)]
    config.rms_norm_eps *= model.config.hidden_size / sizes.hidden_size
    with torch.random.fork_rng(), torch.device(model.device), torch.no_grad():
        torch.manual_seed(seed)
        large: PreTrainedModel = type(model)._from_config(config, dtype=model.dtype)
        for name, parameter in large.named_parameters():
            if name.endswith(_WRITE_RESIDUALS):
                parameter.zero_()
    for name, module in model.named_modules():
        if name.endswith(_NORMS_OF_HEADS):
            own = {key: value for key, value in vars(module).items() if key in ("eps", "variance_epsilon")}
            vars(large.get_submodule(name)).update(own)
    copy_weights(model, large)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large.eval()


@torch.no_grad()
def copy_weights(model: PreTrainedModel, large: PreTrainedModel) -> None:
    """Copy the weights of `model` into the model that was enlarged from it, so that both have the same output."""
    scale = math.sqrt(model.config.hidden_size / large.config.hidden_size)
    one = 1 if model.config.model_type == _HYBRID else 0  # its norms multiply by 1 + weight
    places = dict(large.named_parameters())
    for name, parameter in model.named_parameters():
        weight = (parameter.float() + one) * scale - one if name.endswith(_NORMS) else parameter
        for part, place in zip(_parts(model, name, weight), _parts(large, name, places[name])):
            place[tuple(map(slice, part.shape))].copy_(part)


def _parts(model: PreTrainedModel, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a weight by what its rows compute: queries, keys and values of linear attention share one."""
    if not name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return (weight,)
    keys = model.config.linear_num_key_heads * model.config.linear_key_head_dim
    return weight.split([keys, keys, len(weight) - 2 * keys])


def find_sizes(model: PreTrainedModel, num_parameters: float) -> Sizes:
    """
    Return the sizes of a model of `num_parameters` parameters with the vocabulary of `model`, its size of heads and its
    number of queries per key-value head. Depth grows with width as from TinyLlama (2048 wide, 22 layers) to Llama 2 7B
    (4096, 32), that is sqrt(width) / 2; of all widths, the one whose MLP comes closest to 8 / 3 of it is taken.
    """
    own = _own_sizes(model)
    if not model.num_parameters() <= num_parameters < math.inf:
        raise ValueError(
            f"`num_parameters` must be at least the {model.num_parameters():,} that the model has, and finite, got "
            f"{num_parameters:,.0f}."
        )
    shapes = [own]
    while _count(model, shapes[-1]._replace(intermediate_size=0)) < num_parameters:
        shapes.append(_wider(own, len(shapes) * _WIDTH_STEP))
    fitted = [_with_neurons(model, shape, num_parameters) for shape in shapes]
    possible = [sizes for sizes in fitted if sizes.intermediate_size >= own.intermediate_size]
    return min(possible, key=lambda sizes: abs(math.log(sizes.intermediate_size / sizes.hidden_size * 3 / 8)))


def _own_sizes(model: PreTrainedModel) -> Sizes:
    config = model.config
    if config.model_type not in _MODEL_TYPES:
        raise ValueError(f"Models of type {' or '.join(_MODEL_TYPES)} can be enlarged, got {config.model_type!r}.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = Sizes(**{name: getattr(config, name, 0) for name in Sizes._fields} | {"head_dim": head_dim})
    if _count(model, own) != model.num_parameters():
        raise ValueError(f"{type(model).__name__} has biases or other parameters that cannot be enlarged.")
    return own


def _wider(own: Sizes, added: int) -> Sizes:
    hidden_size = own.hidden_size + added
    queries = own.num_attention_heads // own.num_key_value_heads
    key_value_heads = max(own.num_key_value_heads, round(hidden_size / own.head_dim / queries))
    num_layers = max(own.num_hidden_layers, round(math.sqrt(hidden_size) / 2))
    keys = round(own.linear_num_key_heads * hidden_size / own.hidden_size)
    values = keys * own.linear_num_value_heads // max(own.linear_num_key_heads, 1)
    return Sizes(
        hidden_size, 0, num_layers, key_value_heads * queries, key_value_heads, own.head_dim, keys, values
    )  # fmt: skip


def _with_neurons(model: PreTrainedModel, shape: Sizes, num_parameters: float) -> Sizes:
    """Return the shape with the intermediate size that comes closest to the number of parameters."""
    rest = num_parameters - _count(model, shape._replace(intermediate_size=0))
    neurons = rest / (3 * shape.hidden_size * shape.num_hidden_layers)
    return shape._replace(intermediate_size=round(neurons / _NEURON_STEP) * _NEURON_STEP)


def _count(model: PreTrainedModel, sizes: Sizes) -> int:
    """Return the number of parameters of a model of these sizes with the vocabulary of `model`."""
    config = model.config
    width, num_layers, head_dim = sizes.hidden_size, sizes.num_hidden_layers, sizes.head_dim
    heads, key_value_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    attention, num_linear, linear = 2 * width * head_dim * (heads + key_value_heads), 0, 0
    if config.model_type == _HYBRID:
        attention += width * head_dim * heads + 2 * head_dim  # gates, and norms
        kinds = config.layer_types
        num_linear = sum(kinds[layer % len(kinds)] == "linear_attention" for layer in range(num_layers))
        values = sizes.linear_num_value_heads * config.linear_value_head_dim
        mixed = 2 * sizes.linear_num_key_heads * config.linear_key_head_dim + values
        linear = width * (mixed + 2 * values + 2 * sizes.linear_num_value_heads)
        linear += mixed * config.linear_conv_kernel_dim + 2 * sizes.linear_num_value_heads
        linear += config.linear_value_head_dim
    layers = num_layers * (3 * width * sizes.intermediate_size + 2 * width)
    layers += (num_layers - num_linear) * attention + num_linear * linear
    num_embeddings = 1 if config.tie_word_embeddings else 2
    return num_embeddings * config.vocab_size * width + layers + width
