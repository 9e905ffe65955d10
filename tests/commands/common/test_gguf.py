"""Models in files of llama.cpp: the same weights as in the folder that they were written from."""

import pytest
import torch

from benchmarks.decode.peers.files import write_gguf
from hf_smartspec.commands.common import models
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import check_folder, load_model, load_tokenizer

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
