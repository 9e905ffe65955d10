"""Cost-matched models: the small model's function at the sizes of a large one."""

import copy
import math

import pytest
import torch

from hf_smartspec.commands.common.cost_matched import enlarge, find_sizes
from hf_smartspec.commands.common.models import find_demo, load_model
from hf_smartspec.target_model.compat import CACHE
from tests.models import RECURRENT, new_model, shared_model

HYBRID = ["qwen3_5_text"] if "qwen3_5_text" in RECURRENT else []


def own_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def assert_same_function(small, large):
    ids = torch.randint(4, small.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = small(ids).logits, large(ids).logits
    assert (expected - found).abs().max() <= 1e-4 * expected.abs().max()
    arguments = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert large.generate(ids, **arguments).tolist() == small.generate(ids, **arguments).tolist()


@pytest.mark.parametrize("architecture", ["llama", "mistral", *HYBRID])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_parameters", [3e5, 1e6, 3e6])
def test_computes_the_same_at_the_given_number_of_parameters(architecture, tied, num_parameters):
    small = new_model(architecture, tie_word_embeddings=tied)
    large = enlarge(small, num_parameters)
    assert own_parameters(large) == pytest.approx(num_parameters, rel=0.05)
    assert (large.lm_head.weight is large.model.embed_tokens.weight) == tied
    sizes = [(model.config.hidden_size, model.config.intermediate_size) for model in (small, large)]
    assert sizes[0] < sizes[1]  # of a hybrid, the next width has more than 300,000: its MLP alone grows
    assert_same_function(small, large)


def test_the_demo_target_keeps_its_text_at_thirty_million():
    demo = find_demo()
    assert demo is not None, "it lies in the repository"
    small = load_model(str(demo / "models" / "target"))
    large = enlarge(small, 30e6)
    assert own_parameters(large) == pytest.approx(30e6, rel=0.05)
    assert_same_function(small, large)


def test_a_model_can_have_the_cost_of_itself():
    small = shared_model("llama")
    assert own_parameters(enlarge(small, own_parameters(small))) == own_parameters(small)


@pytest.mark.parametrize(
    ("num_parameters", "width", "depth"), [(205e6, 1024, 16), (1.1e9, 2048, 22), (6.7e9, 4096, 32)]
)
def test_sizes_are_those_of_real_models(num_parameters, width, depth):
    sizes = find_sizes(shared_model("llama"), num_parameters)
    assert sizes.hidden_size == pytest.approx(width, rel=0.15)
    assert sizes.num_hidden_layers == pytest.approx(depth, rel=0.1)
    assert sizes.intermediate_size / sizes.hidden_size == pytest.approx(8 / 3, rel=0.15)
    assert sizes.num_attention_heads * sizes.head_dim == pytest.approx(sizes.hidden_size, rel=0.1)


def test_added_parts_cost_but_do_not_speak():
    small = shared_model("llama")
    large = enlarge(small, 3e6)
    known, width = small.config.num_hidden_layers, small.config.hidden_size
    assert len(large.model.layers) > known
    for layer in large.model.layers[known:]:
        read = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.up_proj)
        assert all(bool((module.weight != 0).all()) for module in read)
        assert not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any()
    first = large.model.layers[0]
    assert not first.mlp.down_proj.weight[width:].any() and first.mlp.down_proj.weight[:width].any()
    assert first.input_layernorm.weight[0].item() == pytest.approx(
        math.sqrt(width / large.config.hidden_size), rel=1e-6
    )
    output = large(torch.tensor([[1, 2, 3]]), use_cache=True)
    assert len(output[CACHE].layers) == large.config.num_hidden_layers
    assert output[CACHE].layers[-1].keys.shape[1] == large.config.num_key_value_heads


def test_leaves_the_model_and_the_generators_and_repeats_with_its_seed():
    small = new_model("llama")
    before, state = copy.deepcopy(small.state_dict()), torch.get_rng_state()
    first, second, other = (enlarge(small, 3e5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    weights = [model.model.layers[-1].mlp.up_proj.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_keeps_the_dtype():
    assert enlarge(new_model("llama", dtype=torch.bfloat16), 3e5).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "num_parameters", "message"),
    [
        (lambda: shared_model("llama"), 10, "`num_parameters` must be at least"),
        (lambda: shared_model("llama"), math.inf, "and finite, got inf"),
        (lambda: shared_model("llama"), math.nan, "and finite, got nan"),
        (lambda: shared_model("gpt2"), 1e6, "llama or mistral or qwen3_5_text can be enlarged, got 'gpt2'"),
        (lambda: new_model("llama", attention_bias=True), 1e6, "biases"),
    ],
)
def test_refuses(model, num_parameters, message):
    with pytest.raises(ValueError, match=message):
        enlarge(model(), num_parameters)
