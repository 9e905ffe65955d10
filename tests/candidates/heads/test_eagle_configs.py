"""Configs and names of published heads of EAGLE: what is read as their authors do, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.kinds import load
from hf_smartspec.prepare.sources import resolve
from hf_smartspec.target_model.drafters.features import FeatureForward
from hf_smartspec.training.eagle import EagleDrafts

from ...models import new_model, shared_model
from .eagle_forwards import check, run, sizes, texts
from .published_eagle import LAYOUTS, THETA, Published, random_heads

IDS = "eagle_aux_hidden_state_layer_ids"
NUM_LAYERS = 36


@pytest.fixture
def target():
    return shared_model("llama")


@pytest.fixture(scope="module")
def deep():
    return new_model("llama", num_hidden_layers=NUM_LAYERS)


def write(target, folder, layout="SpecForge", change_config=None, change_tensors=None, **options) -> Published:
    """Random heads in a layout, as safetensors, with a changed config or changed tensors."""
    hidden, vocab = sizes(target)
    if layout != "1":
        options = {"third": True, "layers": (2, 1, 1), "own_vocab": 60} | options
    published = random_heads(hidden, vocab, **options)
    LAYOUTS[layout](published, vocab, folder)
    pickled = folder / "pytorch_model.bin"
    if pickled.exists():
        save_file(torch.load(pickled, weights_only=True), folder / "model.safetensors")
        pickled.unlink()
    if change_tensors is not None:
        save_file(change_tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    if change_config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(change_config(json.loads(path.read_text()))))
    return published


def check_logits(published: Published, target, folder) -> None:
    """The heads that the library finds in the folder compute what was published."""
    heads = load(str(folder), target)
    assert isinstance(heads, EagleHeads)
    items = texts(published, target, (9, 2, 12))
    forward = FeatureForward(heads)
    check(run(forward, [forward.add() for _ in items], items), published, target, items)


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


# Layer ids in `eagle_config`, and at the top: those of hidden states.
READ_AS = {
    "leaves": ([1, 17, 32], None, (2, 18, 33)),
    "reads": ([2, 18, 33], None, (2, 18, 33)),
    "up to the last": ([24, 30, 36], None, (24, 30, 36)),
    "at the top": (None, [1, 17, 32], (1, 17, 32)),
    "at both": ([1, 17, 32], [1, 17, 32], (2, 18, 33)),
    "nowhere": (None, None, (2, 18, 33)),
    "empty": ([], None, (2, 18, 33)),
}


@pytest.mark.parametrize("case", READ_AS)
def test_layers_by_both_conventions_are_read_and_logged(deep, tmp_path, said_at_info, case):
    nested, top, expected = READ_AS[case]
    entries = {"eagle_config": {} if nested is None else {IDS: nested}} | ({} if top is None else {IDS: top})
    write(deep, tmp_path, change_config=lambda config: config | entries)
    assert EagleHeads.from_pretrained(tmp_path, deep).hidden_layers == expected
    assert f"{tmp_path} reads hidden states {list(expected)}" in said_at_info.text


def test_layers_for_gpt_oss_are_never_shifted(tmp_path):
    target = new_model("gpt_oss", num_hidden_layers=6, layer_types=["full_attention"] * 6)
    write(target, tmp_path, change_config=lambda config: config | {"eagle_config": {IDS: [1, 3, 6]}})
    assert EagleHeads.from_pretrained(tmp_path, target).hidden_layers == (1, 3, 6)


@pytest.mark.parametrize(
    ("key", "ids", "most"),
    [
        (f"eagle_config.{IDS}", [24, 30, 37], 36),
        (f"eagle_config.{IDS}", [1, 30, 36], 35),
        (f"eagle_config.{IDS}", [-1, 3, 5], 36),
        (f"eagle_config.{IDS}", ["1", "2", "3"], 36),
        (IDS, [2, 18, 40], 36),
        (IDS, 18, 36),
    ],
)
def test_layers_out_of_range_are_refused(deep, tmp_path, key, ids, most):
    entries = {"eagle_config": {IDS: ids}} if "." in key else {"eagle_config": {}, IDS: ids}
    write(deep, tmp_path, change_config=lambda config: config | entries)
    with pytest.raises(ValueError) as error:
        EagleHeads.from_pretrained(tmp_path, deep)
    assert str(error.value) == (
        f"{tmp_path}: `{key}` is {ids!r}, and must be a list of integers from 0 to {most} for a target of "
        f"{NUM_LAYERS} layers"
    )
    named = EagleHeads.from_pretrained(tmp_path, deep, hidden_layers=(2, 18, 33))
    assert named.hidden_layers == (2, 18, 33), "what the caller names goes first"
    with pytest.raises(ValueError, match=r"`hidden_layers` is \[2, 18, 37\], and must be .* from 0 to 36"):
        EagleHeads.from_pretrained(tmp_path, deep, hidden_layers=(2, 18, 37))


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_multimodal_positions_are_those_of_text(target, tmp_path, key):
    mrope = {"rope_scaling": {key: "mrope", "mrope_section": [1, 1, 2]}}
    published = write(target, tmp_path, change_config=lambda config: config | mrope)
    check_logits(published, target, tmp_path)


UNKNOWN = {
    "rope_type": ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "`rope_type` in `rope_scaling` is 'su', and"),
    "factor": ({"rope_scaling": {"rope_type": "yarn"}}, "config cannot be used: .*factor"),
    "activation": ({"hidden_act": "swiglu_oai"}, "`hidden_act` is 'swiglu_oai', and known are .*silu"),
    "size": ({"hidden_size": "large"}, "config cannot be used: .*hidden_size"),
    "layer type": ({"layer_types": ["chunked_attention"]}, r"`layer_types` is \['chunked_attention'\], and must be"),
    "window": ({"layer_types": ["sliding_attention"]}, "`sliding_window` must be a positive integer .* got None"),
    "flag": ({"norm_before_residual": "false"}, "`norm_before_residual` must be true or false, and is 'false'"),
    "flag of a norm": ({"norm_output": 1}, "`norm_output` must be true or false, and is 1"),
    "norm": ({"norm_before_fc": True}, "`norm_before_fc` is true, and there is no `input_norm.weight`"),
    "norm of each": ({"fc_norm": True}, "`fc_norm` is true, and there is no `fc_norm.0.weight`"),
    "no layers": ({"eagle_config": {"use_aux_hidden_state": False}}, "read no layers of the target"),
    "P-EAGLE, SpecForge": (
        {"architectures": ["PEagleDraftModel"]},
        r"by 'PEagleDraftModel'\), and have no `mask_hidden`",
    ),
    "P-EAGLE, speculators": ({"speculators_model_type": "peagle"}, r"by 'peagle'\), and have no `mask_hidden`"),
    "P-EAGLE, mask": ({"ptd_token_id": 0}, r"by 'ptd_token_id'\), and have no `mask_hidden`"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_entries_of_unknown_arithmetic_are_refused(target, tmp_path, case):
    entries, said = UNKNOWN[case]
    write(target, tmp_path, change_config=lambda config: config | entries)
    with pytest.raises(ValueError, match=said) as error:
        resolve(str(tmp_path), target)
    assert str(error.value).startswith(f"{tmp_path}: ") and "\n" not in str(error.value)


TENSORS = {
    "P-EAGLE": ({"mask_hidden": torch.ones(1, 96)}, r"`mask_token_id` of heads .* at least 0, got None"),
    "experts": ({"midlayer.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, "not known: midlayer.mlp.experts.0"),
    "scale": ({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, "quantized .*weight_scale`, float32"),
    "inverse": ({"fc.weight_scale_inv": torch.ones(1, 1)}, "quantized .*weight_scale_inv`"),
    "fp8": ({"fc.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)}, r"quantized \(`fc.weight`, float8_e4m3fn\)"),
    "NaN": ({"fc.weight": torch.full((32, 96), torch.nan)}, "`fc.weight` is damaged: 3072 of its 3072 numbers"),
    "infinite": ({"norm.weight": torch.full((32,), torch.inf)}, "`norm.weight` is damaged"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_of_unknown_arithmetic_are_refused(target, tmp_path, case):
    further, said = TENSORS[case]
    write(target, tmp_path, change_tensors=lambda tensors: tensors | further)
    with pytest.raises(ValueError, match=said) as error:
        resolve(str(tmp_path), target)
    assert str(error.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("layout", ["speculators", "SpecForge"])
def test_a_norm_that_nobody_places_stands_where_vllm_has_it(target, tmp_path, layout):
    """Before what is added to in speculators' files, after it in others."""
    published = write(target, tmp_path, layout, lambda config: without(config, "norm_before_residual"))
    published.norm_before_residual = layout == "speculators"
    check_logits(published, target, tmp_path)


def with_prefix(tensors: dict) -> dict:
    return {f"model.{name}": item for name, item in tensors.items()}


FIRST = {
    "prefix": (lambda config: config, with_prefix),
    "no number of layers": (lambda config: without(config, "num_hidden_layers"), dict),
    "neither": (lambda config: without(config, "num_hidden_layers"), with_prefix),
    "vLLM": (lambda config: {"model_type": "eagle", "model": config}, dict),
    "vLLM, overridden": (
        lambda config: {"model_type": "eagle", "model": config | {"rope_theta": 1.0}, "rope_theta": THETA},
        with_prefix,
    ),
    "in `eagle_config`": (lambda config: {"model_type": "eagle", "eagle_config": config}, dict),
    "norms of a Llama": (
        lambda config: config,
        lambda tensors: tensors | {"layers.0.input_layernorm.weight": torch.rand(32), "norm.weight": torch.rand(32)},
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_eagle_1_under_other_names_computes_the_same(target, tmp_path, case):
    change_config, change_tensors = FIRST[case]
    published = write(target, tmp_path, "1", change_config, change_tensors, has_bias=True)
    check_logits(published, target, tmp_path)


@pytest.mark.parametrize("entry", [{"skip_prenorm": False}, {"add_para_norm": True}, {"layernorms": True}])
def test_eagle_1_with_further_norms_is_refused(target, tmp_path, entry):
    write(target, tmp_path, "1", lambda config: {"model_type": "eagle", "model": config | entry})
    with pytest.raises(ValueError, match=rf"{tmp_path}: .* norms that are not known \(`{next(iter(entry))}`\)"):
        resolve(str(tmp_path), target)


@pytest.mark.parametrize("names", [dict, with_prefix])
def test_eagle_1_without_fc_is_no_draft_model(target, tmp_path, names):
    """It has a Llama's layer, and would be one with random norms."""
    write(target, tmp_path, "1", None, lambda found: names({name: found[name] for name in found if "fc" not in name}))
    with pytest.raises(ValueError, match=r"lack weights of LlamaForCausalLM, .*lm_head.weight, .* and \d+ others"):
        resolve(str(tmp_path), target)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLMEagle"]}))
    with pytest.raises(ValueError, match=f"{tmp_path}: holds no heads of EAGLE: it lacks `fc.weight`"):
        resolve(str(tmp_path), target)


@torch.no_grad()
def test_training_sees_the_window_too(target, tmp_path):
    """The first token of drafts, by the forward that trains heads and the one that serves them."""
    write(target, tmp_path, window=4)
    heads = EagleHeads.from_pretrained(tmp_path, target)
    text, states = texts(Published({}, True, 4, 2, 8, heads.hidden_layers), target, (14,))[0]
    served = FeatureForward(heads)
    items = [(text[: end + 1], states[:end]) for end in range(6, 13)]
    expected = torch.stack([run(served, [served.add()], [item])[0][0] for item in items])
    padded = torch.cat([states, states[:1]])[None]
    logits, where = next(iter(EagleDrafts(heads, 1)(text[None], text[None], padded)))
    assert where[0].nonzero().flatten().tolist() == list(range(12))
    torch.testing.assert_close(logits[5:12], expected, rtol=0, atol=1e-5)
