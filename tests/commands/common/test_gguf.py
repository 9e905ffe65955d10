"""Models in files of llama.cpp: the same weights as in the folder that they were written from."""

import pytest
import torch

from benchmarks.decode.peers.files import write_gguf
from hf_smartspec import Int4Linear
from hf_smartspec.commands.common import models
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import (
    check_folder,
    dtype_to_load,
    load_model,
    load_tokenizer,
    use_quantized,
)

from ...benchmarks.decode.peers.test_gguf_file import new_llama


@pytest.fixture
def file(tmp_path):
    pytest.importorskip("gguf")
    model = new_llama()
    write_gguf(model, tmp_path / "tiny.gguf", "float32")
    return model, str(tmp_path / "tiny.gguf")


def test_a_file_is_loaded_like_a_folder(file):
    model, path = file
    loaded = load_model(path, "auto")
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert load_model(path, "bfloat16").dtype == torch.bfloat16


def test_weights_in_four_bits_stay_as_the_file_has_them(tmp_path):
    pytest.importorskip("gguf")
    path = str(tmp_path / "tiny.gguf")
    write_gguf(new_llama(), tmp_path / "tiny.gguf", "int4")
    model = load_model(path, dtype_to_load(path, "bfloat16", "int4"))
    use_quantized(model, "int4", "bfloat16")
    own, expected = model.model.layers[0].mlp.up_proj, load_model(path).model.layers[0].mlp.up_proj
    assert model.dtype == torch.bfloat16 and isinstance(own, Int4Linear)
    assert torch.allclose(own.dequantized(), expected.weight, rtol=0, atol=1e-6)
    assert dtype_to_load(path, "bfloat16", None) == dtype_to_load("folder", "bfloat16", "int4") == "bfloat16"


def test_what_is_missing_is_named(file, monkeypatch, tmp_path):
    _, path = file
    with pytest.raises(UsageError, match="no such model folder"):
        check_folder(str(tmp_path / "missing.gguf"))
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install "hf-smartspec\[gguf\]"'):
        load_model(path)


def test_a_damaged_file_is_refused_by_its_own_name(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"cannot load the model '.*broken.gguf'"):
        load_model(str(tmp_path / "broken.gguf"))
    assert load_tokenizer(str(tmp_path / "broken.gguf")) is None
