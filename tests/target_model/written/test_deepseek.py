"""DeepSeek's kinds written out: attention to latents, and routers that choose groups of experts first."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3TopkRouter

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import latent, latent_layer, packed_forward, written_decoder
from hf_smartspec.target_model.written.experts import Experts, WideRows
from hf_smartspec.target_model.written.latent import LatentPlan
from hf_smartspec.target_model.written.mlps import MLP, CalledMLP
from hf_smartspec.target_model.written.plan import UnknownStructureError
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.rotations import Rotation

from ...covering import exhaustive
from .deepseek import CONFIGS, LATENT, OTHERS, biases_of, new_deepseek
from .test_compiled import by_layers, check_program, tried
from .test_written import TREE, are_near, is_written, logits_of

pytestmark = [
    pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU"),
    pytest.mark.skipif(not LATENT, reason="this release's caches hold keys and values in place of latents"),
]
DTYPES = torch.float32, torch.bfloat16
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.9}
YARN["original_max_position_embeddings"] = 16
OPTIONS = [
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"rope_interleave": False, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"rope_parameters": YARN, "norm_topk_prob": False}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}),
    ("deepseek_v3", {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 32}),
    ("deepseek_v3", {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 32}),
    ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    ("deepseek_v2", {"rope_parameters": YARN}),
    ("glm4_moe", {"use_qk_norm": False, "topk_group": 4}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in CONFIGS), *OPTIONS])
@torch.no_grad()
def test_logits_are_the_models_own_and_every_bit_is_that_of_the_layers(name, options, dtype, programs):
    """Compare ragged rows, trees, chains, and an accepted path; with the model's own in float32."""
    check_program(new_deepseek(name, dtype, **options), programs)


def test_parts_are_told_by_what_they_compute():
    layers = make_plan(new_deepseek("deepseek_v3"))[0].layers
    assert isinstance(layers[0].mlp, MLP) and isinstance(layers[1].mlp, Experts)
    for layer in layers:
        assert isinstance(layer.latent, LatentPlan) and layer.stored_sizes == (48, 16)
        assert isinstance(layer.rotation, Rotation) and layer.rotation.to_halves
    layer = make_plan(new_deepseek("deepseek_v3", rope_interleave=False))[0].layers[0]
    assert isinstance(layer.rotation, Rotation) and not layer.rotation.is_interleaved
    layer = make_plan(new_deepseek("deepseek_v2"))[0].layers[0]
    assert isinstance(layer.rotation, Rotation) and layer.rotation.is_interleaved and not layer.rotation.to_halves


def test_routers_are_told_by_what_they_compute():
    """Recognise groups, which are chosen by sums of two or by the largest; none where all groups are chosen."""
    names = "is_sigmoid norms factor groups num_groups adds_two".split()
    for name, options, expected in (
        ("deepseek_v3", {}, (True, True, 1.5, 4, 2, True)),
        ("glm4_moe", {"norm_topk_prob": False}, (True, False, 1.5, 4, 2, True)),
        ("dots1", {"topk_group": 4}, (True, True, 1.5, 0, 0, False)),
        ("deepseek_v2", {}, (False, False, 1.5, 4, 2, False)),
        ("deepseek_v2", {"topk_method": "greedy"}, (False, False, 1.5, 0, 0, False)),
        ("hy_v3", {}, (True, True, 1.7, 0, 0, False)),
        ("minimax_m2", {}, (True, True, 1.0, 0, 0, False)),
    ):
        model = new_deepseek(name, **options)
        experts = make_plan(model)[0].layers[1].mlp
        assert isinstance(experts, Experts) and experts.routing.num_chosen == 3
        assert tuple(getattr(experts.routing, own) for own in names) == expected
        assert (experts.bias() is None) == (name == "deepseek_v2")
        assert (experts.shared is None) == (name == "minimax_m2")


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
@torch.no_grad()
def test_experts_are_those_of_the_model(name):
    """Compare choices and weights of many tokens, which routers make in float32 in any dtype."""
    for dtype in DTYPES:
        model = new_deepseek(name, dtype)
        block, experts = model.model.layers[1].mlp, make_plan(model)[0].layers[1].mlp
        assert isinstance(experts.router, WideRows) == (dtype == torch.bfloat16)
        x = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        bound = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(experts(x[0]), block(x)[0], rtol=bound, atol=bound * block(x).std().item())
        if dtype == torch.bfloat16:
            block.gate.bfloat16()
            assert isinstance(make_plan(model)[0].layers[1].mlp, CalledMLP), "weights that are widened for each forward"


CHANGES = "bias q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj router shared".split()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["in place", "replaced", *exhaustive(["uncounted"])])
@torch.no_grad()
def test_changes_are_seen(change, way):
    model = new_deepseek("deepseek_v3")
    before, layer = logits_of(packed_forward(model)), model.model.layers[1]
    owners = {"router": layer.mlp.gate, "shared": layer.mlp.shared_experts.down_proj}
    owner, name = owners.get(change) or getattr(layer.self_attn, change, None), "weight"
    if change == "bias":
        owner, name = layer.mlp.gate, "e_score_correction_bias"
    tensor, changed = getattr(owner, name), getattr(owner, name).flip(0) * 1.5
    if way == "replaced":
        setattr(owner, name, changed if change == "bias" else nn.Parameter(changed))
    else:
        (tensor if way == "in place" else tensor.data).copy_(changed)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)
    assert written_decoder(model)._is_tried


@pytest.mark.parametrize("change", ["topk_group", "top_k", "routed_scaling_factor", "rope_interleave", "scaling"])
@torch.no_grad()
def test_changes_of_numbers_are_seen(change):
    model = new_deepseek("deepseek_v3")
    before, layer = logits_of(packed_forward(model)), model.model.layers[1]
    if change == "rope_interleave":
        model.config.rope_interleave = False
    elif change == "scaling":
        layer.self_attn.scaling = 0.5
    else:
        setattr(layer.mlp.gate, change, 1)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)


def test_a_rotation_that_is_replaced_is_seen(monkeypatch):
    model = new_deepseek("deepseek_v3")
    assert is_written(model)
    own, name = modeling_deepseek_v3.apply_rotary_pos_emb, "apply_rotary_pos_emb_interleave"
    monkeypatch.setattr(modeling_deepseek_v3, name, own)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


class OtherRouter(DeepseekV3TopkRouter):
    def forward(self, hidden_states):
        logits, weights, choices = super().forward(hidden_states)
        return logits, weights**2, choices


class OtherAttention(DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys, values * 2


def test_parts_of_other_kinds_are_called_or_left_to_the_models_own_forward():
    model = new_deepseek("deepseek_v3")
    model.model.layers[1].mlp.gate.__class__ = OtherRouter
    assert isinstance(make_plan(model)[0].layers[1].mlp, CalledMLP)
    model = new_deepseek("deepseek_v3")
    model.model.layers[1].mlp.gate.topk_group = 1
    assert isinstance(make_plan(model)[0].layers[1].mlp, CalledMLP), "fewer experts in groups than are chosen"
    model = new_deepseek("deepseek_v3")
    model.model.layers[1].mlp.gate.e_score_correction_bias = torch.zeros(1)
    assert isinstance(make_plan(model)[0].layers[1].mlp, CalledMLP)
    model = new_deepseek("deepseek_v3")
    model.model.layers[0].self_attn.__class__ = OtherAttention
    assert not is_written(model)
    model = new_deepseek("deepseek_v3")
    model.model.layers[0].self_attn.kv_b_proj.bias = nn.Parameter(torch.ones(4 * 56), requires_grad=False)
    assert not is_written(model)


@pytest.mark.parametrize("is_replaced", [False, True])
@torch.no_grad()
def test_biases_in_another_dtype_than_scores(is_replaced):
    """Biases in bfloat16 beside scores in float32: files have both in float32. Experts are the block's own then."""
    model = new_deepseek("deepseek_v3", torch.bfloat16)
    if is_replaced:
        logits_of(packed_forward(model))
    for owner in biases_of(model):
        owner.e_score_correction_bias = owner.e_score_correction_bias.to(torch.bfloat16) * 5
    logits_of(packed_forward(model))
    block, x = model.model.layers[1].mlp, torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    mlp = written_decoder(model).plan.layers[1].mlp
    assert isinstance(mlp, CalledMLP) and torch.equal(mlp(x[0]), block(x)[0])


@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_does_more_is_left_to_the_models_own_forward(name):
    with pytest.raises(UnknownStructureError, match=r"[Aa]ttention"):
        make_plan(new_deepseek(name))


@pytest.mark.parametrize("is_compiled", [True, False])
@torch.no_grad()
def test_rows_that_share_a_prefix(is_compiled, monkeypatch):
    """In compiled code, their bits are those of rows that share nothing."""
    if not is_compiled:
        monkeypatch.setattr(latent_layer, "can_attend_to_latents", lambda *tensors: False)
    model = new_deepseek("deepseek_v3")
    forward, text = tried(model) if is_compiled else by_layers(model), np.arange(3, 43)
    base, alone = forward.add(), forward.add()
    forward.forward([RowInput(base, text), RowInput(alone, text)])
    sharers = [forward.add() for _ in range(2)]
    for row in sharers:
        row.prefix_row, row.prefix_len, row.length = base, len(text), len(text)
    logits, offsets = forward.forward([RowInput(row, np.array([9, 11]), TREE) for row in (*sharers, alone)])
    first, second, expected = (logits[start : start + 5] for start in offsets)
    assert are_near(first, expected) and are_near(second, expected)
    assert not is_compiled or (torch.equal(first, expected) and torch.equal(second, expected))


@pytest.mark.parametrize("size", ["qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"])
@torch.no_grad()
def test_other_sizes_run_layer_by_layer(size, programs):
    model = new_deepseek("deepseek_v3", **{size: 24})
    assert is_written(model)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))
    assert not programs


@torch.no_grad()
def test_attention_without_compiled_code_is_the_models_own(monkeypatch):
    """Multiply all latents at once, as on a GPU."""
    monkeypatch.setattr(latent_layer, "can_attend_to_latents", lambda *tensors: False)
    monkeypatch.setattr(latent, "most_tokens", lambda dtype: 0)
    model = new_deepseek("deepseek_v3")
    assert are_near(logits_of(by_layers(model)), logits_of(PackedForward(model)))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "glm4_moe", "minicpm3"])
def test_tokens_are_those_of_generate(name):
    """Decode ragged rows with drafts, in float32."""
    model = new_deepseek(name)
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 0, 0
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **arguments)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, **arguments, assistant="auto"), expected)
    assert written_decoder(model)._is_tried


@pytest.mark.parametrize("assistant", ["auto", "none"])
def test_engines_give_the_tokens_of_generate(assistant):
    """Requests that begin alike, so that rows share a prefix."""
    model = new_deepseek("deepseek_v3")
    beginning = np.random.default_rng(0).integers(3, 90, 70).tolist()
    prompts = [[*beginning, token, token + 1] for token in (5, 9, 30, 60)]
    with hf_smartspec.Engine(model, assistant, max_batch_size=4) as engine:
        outputs = engine.generate(prompts, max_new_tokens=12, do_sample=False)
    for prompt, output in zip(prompts, outputs):
        (expected,) = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
        ).tolist()
        assert output.generated_tokens == expected[len(prompt) :]
    assert written_decoder(model)._is_tried
