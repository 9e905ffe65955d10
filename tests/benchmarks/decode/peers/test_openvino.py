"""Files for OpenVINO: arrays, and the graph made of them, where OpenVINO is installed."""

import copy
import json

import numpy as np
import pytest
import torch

from benchmarks.decode.peers.files import write_files

from .test_gguf_file import new_llama


@pytest.fixture
def arrays(tmp_path):
    def write(model):
        return write_files(model, model, ["arrays"], "float32", tmp_path)["arrays"]

    return write


def test_arrays_hold_every_weight_in_float32_and_the_sizes(arrays):
    model = new_llama().bfloat16()
    with np.load(arrays(model)) as found:
        config = json.loads(str(found["config"]))
        weights = {name: torch.from_numpy(found[name]) for name in found if name != "config"}
    assert config == {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(weights[name], weight.float()) for name, weight in model.named_parameters())


def test_other_models_are_refused(arrays):
    with pytest.raises(ValueError, match="without biases"):
        arrays(new_llama(attention_bias=True))


def rounded(name, weight, kind):
    """A matrix as it is stored."""
    if kind == "int4" and "layers" in name:
        groups = weight.unflatten(1, (-1, 32))
        lowest, highest = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        scales = ((highest - lowest) / 15).half().float()
        zeros = (-lowest / scales).round().clamp(0, 15)
        return (((groups / scales).round() + zeros).clamp(0, 15).sub(zeros) * scales).flatten(1)
    if kind == "bfloat16":
        return weight.bfloat16().float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    return weight if kind == "float32" else (weight / scales).round() * scales


@torch.no_grad()
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_graph_computes_what_the_model_computes_step_by_step(arrays, tmp_path, kind, tied):
    openvino = pytest.importorskip("openvino", reason="OpenVINO lives in an environment of its own")
    from benchmarks.decode.peers.runners.openvino_graph import write_graph

    model = new_llama(64, tied)
    original = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        weight.copy_(rounded(name, weight, kind) if weight.ndim > 1 else weight)
    # In four bits, what is rounded has other scales.
    write_graph(arrays(original if kind == "int4" else model), kind, tmp_path / "graph")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    core = openvino.Core()
    request = core.compile_model(tmp_path / "graph" / "openvino_model.xml", "CPU", settings).create_infer_request()
    ids = torch.randint(0, 40, (2, 9))
    expected = model(ids).logits
    for first, last in ((0, 6), (6, 7), (7, 9)):
        places = np.arange(first, last)[None].repeat(2, 0)
        inputs = {"input_ids": ids[:, first:last].numpy(), "attention_mask": np.ones((2, last), np.int64)}
        request.infer(inputs | {"position_ids": places, "beam_idx": np.arange(2, dtype=np.int32)})
        logits = torch.from_numpy(request.get_tensor("logits").data.copy())
        assert (logits - expected[:, first:last]).abs().max() <= 1e-5 * expected.abs().max()
