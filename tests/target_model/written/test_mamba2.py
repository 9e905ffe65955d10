"""State spaces (Mamba-2) written out: the numbers of the models' own layers, as one compiled program."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import silu

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.compiled import can_compile
from hf_smartspec.target_model.written.recognition import make_plan

from ...models import RECURRENT, new_model
from .test_compiled import check_program
from .test_written import are_near, is_written, logits_of

pytestmark = pytest.mark.skipif("bamba" not in RECURRENT, reason="this release's layers are not known")
compiles = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")

_GRANITE = {"hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1}
_NEMOTRON = {"hidden_size": 64, "head_dim": 16, "mamba_head_dim": 16, "ssm_state_size": 16, "time_step_min": 0.3}
# Kinds of layers that have state spaces, in sizes that compiled code serves, and their options.
KINDS = {
    "bamba": ("bamba", {"head_dim": 16}),
    "bamba+options": ("bamba", {"head_dim": 16, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3}),
    "granite": ("granitemoehybrid", _GRANITE | {"num_local_experts": 0, "residual_multiplier": 0.5}),
    "granite+rope": ("granitemoehybrid", _GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "nemotron_h": ("nemotron_h", _NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
    "nemotron_h+ends": ("nemotron_h", _NEMOTRON | {"layers_block_type": ["mlp", "full_attention", "linear_attention"]}),
    "mamba2": (
        "mamba2",
        {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "residual_in_fp32": False, "n_groups": 2},
    ),
    "granite+experts": ("granitemoehybrid", _GRANITE | {"attention_multiplier": 0.3, "embedding_multiplier": 2.0}),
}


def made(kind: str, **options):
    """A model whose biases, rates and factors of values differ from head to head."""
    name, own = KINDS[kind]
    model, generator = new_model(name, **own | options), torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith((".D", ".A_log", ".dt_bias", "norm.weight")):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def mixer_of(model) -> nn.Module:
    return next(module for module in model.modules() if hasattr(module, "A_log"))


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_bit_is_that_of_the_layers(kind, dtype, programs):
    """Whose numbers are also the model's own, in float32."""
    check_program(made(kind).to(dtype), programs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, (0.4, 0.6)])
def test_tokens_are_those_of_generate(kind, limit):
    """Limits of time steps apply to prompts only."""
    model = made(kind, **{} if limit is None else {"time_step_limit": limit})
    ids = torch.randint(3, 90, (2, 90), generator=torch.Generator().manual_seed(0))
    arguments = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **arguments)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, **arguments, assistant="auto"), expected)
    assert is_written(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_sizes_that_compiled_code_does_not_serve_run_layer_by_layer(dtype):
    model = made("granite", mamba_n_heads=16, mamba_d_head=8, mamba_d_state=8).to(dtype)
    assert is_written(model) and not can_compile(written_decoder(model).plan)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) if dtype == torch.float32 else found.isfinite().all()


@torch.no_grad()
def test_experts_in_layers_of_one_part_are_called():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    experts |= {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
    model = made("nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention"], **experts)
    assert is_written(model) and not can_compile(written_decoder(model).plan)
    assert are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@compiles
@torch.no_grad()
def test_prompts_with_limited_time_steps_are_no_programs(programs):
    model = made("nemotron_h")
    forward, own = packed_forward(model), PackedForward(model)
    found = []
    for item in (forward, own):
        row = item.add()
        row.least_length = 12
        programs.clear()
        pieces = np.arange(3, 10), np.arange(10, 15), np.array([5]), np.array([7])
        found.append(torch.cat([item.forward([RowInput(row, piece)])[0] for piece in pieces]))
        assert programs == ([1, 1] if item is forward else [])
    assert are_near(*found)
    assert not written_decoder(model).is_reproducible, "limits round all tokens beside a prompt otherwise"


@torch.no_grad()
def test_sums_in_float32_are_left_to_the_model():
    """Refuse models in bfloat16 whose residuals are in float32."""
    model = made("mamba2", residual_in_fp32=True)
    assert is_written(model) and not is_written(made("mamba2", residual_in_fp32=True).bfloat16())


@pytest.mark.parametrize("name", ["A_log", "D", "dt_bias", "norm.weight", "conv1d.weight", "in_proj.weight"])
@pytest.mark.parametrize("way", ["in place", "replaced"])
@torch.no_grad()
def test_changes_of_weights_are_seen(name, way):
    model = made("bamba")
    before, (path, _, own) = logits_of(packed_forward(model)), name.rpartition(".")
    module = mixer_of(model).get_submodule(path)
    changed = getattr(module, own) * -0.5
    if way == "in place":
        getattr(module, own).copy_(changed)
    else:
        setattr(module, own, nn.Parameter(changed, requires_grad=False))
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)


@torch.no_grad()
def test_changes_of_limits_are_seen():
    model = made("bamba")
    logits_of(packed_forward(model))
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    arguments = {"max_new_tokens": 20, "do_sample": False}
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.time_step_limit = (2.0, 3.0)
    expected = model.generate(ids, **arguments)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, **arguments, assistant="auto"), expected)


def _gated_last(self, hidden_states, gate=None):
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    normed = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * normed * silu(gate.to(torch.float32))


@pytest.mark.parametrize("part", ["norm", "activation", "buffer"])
@torch.no_grad()
def test_other_state_spaces_are_not_written_out(part):
    model = made("bamba")
    mixer = mixer_of(model)
    if part == "norm":
        kind = type(mixer.norm)
        mixer.norm.__class__ = type(kind.__name__, (kind,), {"forward": _gated_last, "__module__": kind.__module__})
    elif part == "activation":
        mixer.activation = "gelu"
    else:
        mixer.register_buffer("multipliers", torch.ones(3))
    assert not is_written(model)
    assert torch.equal(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@torch.no_grad()
def test_values_beside_experts_are_those_of_both():
    """An MLP that all tokens share stands in the layer, not in the block of experts."""
    plan = make_plan(made("granite+experts"))[0]
    assert all(layer.mlp.shared is not None for layer in plan.layers)
