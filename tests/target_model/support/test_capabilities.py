"""What probes find of a model, behind the lengths at which it changes its ways."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import wraps

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_smartspec
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.support import capabilities as support
from hf_smartspec.target_model.support.capabilities import packing_obstacle, rowwise_obstacle
from hf_smartspec.target_model.support.probe import Probe
from hf_smartspec.target_model.support.twin import BORDERS, borders, sharpened, small_config, small_twin

from ...architectures import CHANGES, small_model
from ...covering import exhaustive
from ...models import RECURRENT, new_model

# Models that choose the keys of a query by what is run together, and what their configs call the length behind which
# they do, with its usual value.
SPARSE = {
    "deepseek_v32": {"index_topk": 2048},
    "glm_moe_dsa": {"index_topk": 2048},
    "minimax_m3_vl_text": {"index_topk_blocks": 16, "index_block_size": 128},
    "doge": {"keep_window_size": 2048},
}


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_leaves_a_model_to_plain_decoding(name, is_long, monkeypatch):
    """Texts of a few tokens do not tell where the border is far: a twin of the model does."""
    if is_long:
        monkeypatch.setitem(CHANGES, name, CHANGES.get(name, {}) | SPARSE[name])
    model = small_model(name)
    reason = rowwise_obstacle(model)
    assert packing_obstacle(model) and reason
    expected = SPARSE[name] if is_long else {key: BORDERS[key] for key in SPARSE[name]}
    assert all(f"`{key}={value}`" in reason for key, value in expected.items()), reason
    assert "does not compute several tokens at once as one at a time" in reason


def test_far_borders_of_models_that_are_packed_are_crossed_in_a_twin(monkeypatch):
    subjects = []
    init = Probe.__init__
    monkeypatch.setattr(Probe, "__init__", lambda self, *args: subjects.append(args[0]) or init(self, *args))
    model = new_model("ministral", sliding_window=4096)
    assert packing_obstacle(model) is None
    twin = subjects[-1]
    assert twin is not model and type(twin) is type(model) and twin.config.sliding_window == BORDERS["sliding_window"]
    near = new_model("ministral")
    assert packing_obstacle(near) is None and subjects[-1] is near


def test_a_model_is_tried_out_without_autocast_whose_rounding_would_be_held_against_it():
    model = new_model("gemma4_text")
    with torch.autocast("cpu", torch.bfloat16):
        assert packing_obstacle(model) is None


def test_windows_that_only_the_models_own_masks_know_are_found():
    """The chunks of Llama 4 are no argument of its attention."""
    model = small_model("llama4_text")
    assert packing_obstacle(model) and rowwise_obstacle(model) is None


def test_models_whose_borders_cannot_be_tried_out_are_decoded_plainly(monkeypatch):
    def fail(model):
        raise ValueError("sizes that depend on one another")

    monkeypatch.setattr(support, "small_twin", fail)
    model = new_model("ministral", sliding_window=4096)
    for reason in (packing_obstacle(model), rowwise_obstacle(model)):
        assert reason == "what MinistralForCausalLM does after `sliding_window=4096` tokens cannot be tried out"
    assert packing_obstacle(new_model("apertus")) is None, "without borders there is nothing to try out"


def test_models_that_pad_in_their_own_way_are_packed_alone_only():
    model = small_model("whisper")
    assert packing_obstacle(model) is None
    assert packing_obstacle(model, is_padded=True) == "WhisperForCausalLM pads rows in its own way"
    assert rowwise_obstacle(model) is None


def test_a_model_is_probed_once_and_random_numbers_are_left_alone(monkeypatch):
    model = new_model("ministral", sliding_window=4096)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert packing_obstacle(model, is_padded=True) is None
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(Probe, "agrees", None)
    assert packing_obstacle(model, is_padded=True) is None


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "gpt2", "bloom", "qwen3_moe", "phi3", "llama4"])
def test_twins_of_the_usual_configs_are_small(name):
    config = small_config(CONFIG_MAPPING[name]())
    assert max(borders(config).values(), default=0) <= 16
    text = config.get_text_config(decoder=True)
    assert text.num_hidden_layers <= 8 and text.hidden_size <= 32 and text.vocab_size < 100


def test_twins_have_layers_of_every_kind():
    layer_types = [*["sliding_attention"] * 3, "full_attention"]
    model = new_model("gemma3_text", num_hidden_layers=8, layer_types=layer_types * 2)
    assert small_twin(model).config.layer_types == layer_types


_MOSTLY_MAMBA = [*["mamba"] * 5, "attention", *["mamba"] * 4]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mamba2", {}),
        ("falcon_mamba", {}),
        ("jamba", {}),
        ("minimax", {}),
        ("bamba", {"attn_layer_indices": [9, 18, 27]}),
        ("granitemoehybrid", {"num_hidden_layers": 10, "layer_types": _MOSTLY_MAMBA}),
        ("falcon_h1", {}),
        ("nemotron_h", {}),
        ("zamba2", {}),
        ("qwen3_next", {}),
        ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 3}),
        ("qwen3_5_text", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
        ("kimi_linear", {}),
    ],
)
def test_twins_of_hybrids_of_the_usual_sizes_are_packed(name, changes):
    """Large hybrids in half precision are judged by their twins alone."""
    config = small_config(CONFIG_MAPPING[name](**changes))
    model = sharpened(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False))
    assert Probe(model, (4, 7), 6).agrees(PackedForward)


@pytest.mark.skipif("qwen3_5_text" not in RECURRENT, reason="this release's layers with states are not known")
def test_kernels_that_round_otherwise_are_no_reason_to_decode_plainly(monkeypatch):
    """Those of flash-linear-attention multiply float32 in TF32."""
    model = new_model("qwen3_5_text")
    owner = sys.modules[type(model).__module__]
    function = owner.torch_chunk_gated_delta_rule

    @wraps(function)
    def coarse(*args, **kwargs):
        output, state = function(*args, **kwargs)
        return output * 1.01, state

    monkeypatch.setattr(owner, "torch_chunk_gated_delta_rule", coarse)
    assert packing_obstacle(model) is None and owner.torch_chunk_gated_delta_rule is coarse


def test_twins_lie_on_the_cpu_wherever_new_tensors_do():
    model = new_model("mistral", sliding_window=4096)
    with torch.device("meta"):
        twin = small_twin(model)
    assert {parameter.device.type for parameter in twin.parameters()} == {"cpu"}


def test_probes_in_several_threads_leave_the_training_mode_as_it_was(monkeypatch):
    model = new_model("stablelm").train()
    monkeypatch.setattr(support, "TESTED_MODEL_TYPES", ())
    running, most = [0], [0]
    agrees = Probe.agrees

    def counted(self, way):
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return agrees(self, way)
        finally:
            running[0] -= 1

    monkeypatch.setattr(Probe, "agrees", counted)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: rowwise_obstacle(model) or packing_obstacle(model), range(8)))
    assert len(set(found)) == 1 and most == [1]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ["bfloat16", *exhaustive(["int8"], ["float16"], ["int8 bfloat16"])])
def test_real_models_that_round_coarsely_are_packed_and_run_chains(kind, real_folder, monkeypatch):
    """Rounding adds up over thirty layers, which is no fault of the architecture."""
    monkeypatch.setattr(support, "TESTED_MODEL_TYPES", ())
    monkeypatch.setattr(support, "TESTED_ROWWISE_TYPES", ())
    dtype = torch.float32 if kind == "int8" else getattr(torch, kind.split()[-1])
    model = AutoModelForCausalLM.from_pretrained(real_folder, dtype=dtype)
    if "int8" in kind:
        hf_smartspec.quantize(model)
    assert packing_obstacle(model, is_padded=True) is None and rowwise_obstacle(model) is None


@pytest.fixture
def without_twins(monkeypatch):
    def fail(model):
        raise ValueError("sizes that depend on one another")

    monkeypatch.setattr(support, "small_twin", fail)
    monkeypatch.setattr(
        "hf_smartspec.target_model.support.probe._GROSS", 100.0
    )  # the half-precision model itself tells nothing


@pytest.mark.parametrize("name", ["apertus", "llama4_text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_that_have_no_twin_are_tried_out_in_a_float32_copy(
    name, dtype, without_twins, monkeypatch
):
    monkeypatch.setattr(support, "TESTED_ROWWISE_TYPES", ())
    model = small_model(name).to(dtype)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert rowwise_obstacle(model) is None
    assert (packing_obstacle(model) is None) == (name == "apertus"), "Llama's chunks are in its own masks only"
    state = model.state_dict()
    assert all(state[key].dtype == value.dtype and torch.equal(state[key], value) for key, value in weights.items())


def test_models_in_half_precision_that_are_too_large_for_a_copy_are_decoded_plainly(without_twins, monkeypatch):
    model = small_model("apertus").bfloat16()
    monkeypatch.setattr(support, "_COPIED", sum(item.numel() for item in model.parameters()) - 1)
    assert packing_obstacle(model) == "what ApertusForCausalLM computes in torch.bfloat16 cannot be tried out"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_a_float32_twin_tells_what_is_wrong(dtype, monkeypatch):
    model = small_model("llama4_text").to(dtype)
    monkeypatch.setattr("hf_smartspec.target_model.support.probe._GROSS", 100.0)
    assert packing_obstacle(model), "its chunks are in its own masks only"
