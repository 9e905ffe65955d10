"""Ministral 3 written out, which multiplies queries by factors that grow with positions."""

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.support.twin import ROPE_BORDER, borders, small_twin
from hf_smartspec.target_model.written import packed_forward, written_decoder

from ... import models
from ...models import new_model
from .test_compiled import check_program
from .test_written import are_near, is_written, logits_of

ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
ROPE |= {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.7}


@pytest.fixture(autouse=True)
def _config(monkeypatch):
    config = models.PACKED["llama"][1] | {"head_dim": 16, "rope_parameters": ROPE}
    monkeypatch.setitem(models.CONFIGS, "ministral3", ("Ministral3Config", config))


@torch.no_grad()
def test_logits_are_the_models_own():
    model = new_model("ministral3")
    found = logits_of(packed_forward(model))
    assert is_written(model) and are_near(found, logits_of(PackedForward(model)))
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert not are_near(found, logits_of(packed_forward(model))), "the factors count"


@pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_every_bit_is_that_of_the_layers(dtype, programs):
    check_program(new_model("ministral3", dtype=dtype), programs)


@torch.no_grad()
def test_changed_numbers_are_seen():
    model = new_model("ministral3")
    before = logits_of(packed_forward(model))
    model.config.rope_parameters["llama_4_scaling_beta"] = 3.0
    found, expected = logits_of(packed_forward(model)), logits_of(PackedForward(model))
    assert is_written(model) and are_near(found, expected) and not are_near(found, before)


@torch.no_grad()
def test_numbers_of_tokens_do_not_depend_on_their_forward():
    model, text = new_model("ministral3", dtype=torch.bfloat16), np.random.default_rng(0).integers(3, 90, 40)
    found = []
    for ends in ([40], [9, 23, 40]):
        forward, begin = packed_forward(model), 0
        row = forward.add()
        for end in ends:
            logits, _ = forward.forward([RowInput(row, text[begin:end])])
            begin = end
        found.append(logits[-1])
    assert torch.equal(*found)


def test_models_are_tried_past_the_length_at_which_factors_begin():
    model = new_model("ministral3")
    assert borders(model.config) == {"original_max_position_embeddings": 7}
    assert small_twin(model).config.rope_parameters["original_max_position_embeddings"] == ROPE_BORDER


@torch.no_grad()
def test_tokens_are_those_of_generate():
    model = new_model("ministral3")
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, assistant="auto"), expected)
    assert written_decoder(model)._is_tried == has_kernels(torch.float32)
