"""Qwen3-Next written out: delta rules whose maps return what belongs to a head of keys together."""

import pytest
import torch
from torch import nn

import hf_smartspec
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.recognition import make_plan

from ...models import RECURRENT, new_model
from .test_written import are_near, is_written, logits_of

pytestmark = pytest.mark.skipif("qwen3_next" not in RECURRENT, reason="this release's layers are not known")


def new_qwen(**options):
    return new_model("qwen3_next", linear_key_head_dim=16, linear_value_head_dim=32, **{"head_dim": 16} | options)


@pytest.mark.parametrize("heads", [(2, 4), (1, 4), (4, 4)])
@torch.no_grad()
def test_numbers_are_arranged_as_by_the_model(heads):
    model = new_qwen(linear_num_key_heads=heads[0], linear_num_value_heads=heads[1])
    module, plan = model.model.layers[0].linear_attn, make_plan(model)[0].layers[0]
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    own = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    states, expected = plan.query_key_value(x[0]), torch.cat([item[0].flatten(1) for item in own], dim=1)
    found = torch.cat([states[:, begin : begin + num] for begin, num in plan.recurrence.parts.tolist()], dim=1)
    torch.testing.assert_close(found, expected)
    assert torch.equal(plan.recurrence._arranged(states), found) and torch.equal(states, found) == (heads[0] == 1)
    assert sum(plan.recurrence.sizes) == states.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_the_models_own(dtype):
    model = new_qwen().to(dtype)
    assert is_written(model)
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) if dtype == torch.float32 else found.isfinite().all()


@pytest.mark.parametrize("name", ["in_proj_qkvz", "in_proj_ba"])
@pytest.mark.parametrize("way", ["in place", "replaced", "another map"])
@torch.no_grad()
def test_changes_of_maps_are_seen(name, way):
    model = new_qwen()
    before, module = logits_of(packed_forward(model)), model.model.layers[0].linear_attn
    weight = getattr(module, name).weight
    if way == "in place":
        weight.copy_(weight.flip(0))
    elif way == "replaced":
        getattr(module, name).weight = nn.Parameter(weight.flip(0), requires_grad=False)
    else:
        setattr(module, name, nn.Sequential(getattr(module, name), nn.Tanh()))
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert are_near(found, expected) and not are_near(found, before)


def test_tokens_are_those_of_generate():
    model = new_qwen()
    ids = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    arguments = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **arguments)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, **arguments, assistant="auto"), expected)
    assert written_decoder(model) is not None
