"""Scores of heads become logits as in the models' own forwards, in all of transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_smartspec.target_model.logits import LogitScaling
from hf_smartspec.target_model.support.twin import small_config

from ..architectures import NAMES, small_model
from ..covering import IS_EXHAUSTIVE, part_of

VALUES = {
    "final_logit_softcapping": 2.0,
    "lm_head_multiplier": 0.4,
    "logit_scale": 0.3,
    "logits_mup_width_multiplier": 3.0,
    "logits_scaling": 5.0,
    "logits_soft_cap": 2.0,
    "output_logit_soft_cap": 2.0,
    "output_multiplier": 0.5,
}
REPRESENTATIVE = ("falcon_h1", "gemma2", "granite", "hyperclovax", "inkling_text", "recurrent_gemma")
# BERT's relatives have layers between the last hidden state and the head; others' decoders `get_decoder` does not find.
WITHOUT_LAST_STATES = set(
    "bert big_bird camembert data2vec-text electra ernie llama4 llama4_text megatron-bert mllama modernbert-decoder "
    "prophetnet rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod".split()
)


def scaled(config):
    """The config, with every entry of `VALUES` that it has."""
    text = config.get_text_config(decoder=True)
    for name in VALUES.keys() & text.to_dict().keys():
        setattr(text, name, VALUES[name])
    return config


@torch.no_grad()
def check(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    ids = torch.tensor([[5, 9, 7, 30, 3, 8]])
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    found = LogitScaling.of(model).apply(model.get_output_embeddings()(hidden))
    torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_LAST_STATES) if IS_EXHAUSTIVE else REPRESENTATIVE)
def test_the_heads_scores_become_the_models_logits(name):
    model = small_model(name)
    check(type(model)(scaled(model.config)).eval())


# Around decoders of which some scale or cap by themselves: not all of these models do the same.
VISUAL = (
    *("cohere2_vision", "gemma3", "gemma4", "gemma4_unified", "granite_docling", "hyperclovax_vision_v2", "inkling2"),
    *("inkling2_loop", "mistral_large4", "muse_glimmer"),
)


@pytest.mark.parametrize("name", part_of(VISUAL, "gemma3", "hyperclovax_vision_v2"))
def test_so_do_those_of_models_that_see(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this release has no {name}")
    check(AutoModelForMultimodalLM.from_config(scaled(small_config(CONFIG_MAPPING[name]()))).eval())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("granite_speech", LogitScaling()),
        ("muse_spark", LogitScaling(multiplier=0.5, softcap=2.0)),
        ("xlstm", LogitScaling(softcap=2.0)),
    ],
)
def test_scales_of_models_that_are_not_small(name, expected):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this release has no {name}")
    config = scaled(CONFIG_MAPPING[name]())
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForMultimodalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    assert LogitScaling.of(model) == expected


def test_forwards_that_call_others_do_as_these():
    class Own(AutoModelForCausalLM._model_mapping[CONFIG_MAPPING["gemma2"]]):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    config = scaled(small_config(CONFIG_MAPPING["gemma2"]()))
    check(Own(config).eval())


def test_a_scale_that_the_model_keeps_is_the_models():
    model = small_model("cohere")
    assert LogitScaling.of(model).multiplier == model.logit_scale
    model.config.logit_scale *= 20  # which its forward does not read again
    check(model)
    model.logit_scale *= 3
    check(model)


def test_forwards_of_others_scale_by_all_that_the_config_has(monkeypatch):
    kind = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING["gemma2"]]
    model, own = kind(scaled(small_config(CONFIG_MAPPING["gemma2"]()))).eval(), kind.forward

    def forward(self, *args, **kwargs):
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    check(model)
