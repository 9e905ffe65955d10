"""Learned drafters are known by their files, whatever their kind."""

import json

import pytest

from hf_smartspec import BlockDrafter, EagleHeads, MedusaHeads, MLPSpeculator, MtpLayers
from hf_smartspec.candidates.heads import files
from hf_smartspec.candidates.heads.files import config_of
from hf_smartspec.candidates.heads.kinds import KINDS, load, source_of
from hf_smartspec.goodput import Calibrator
from hf_smartspec.prepare.sources import resolve
from hf_smartspec.training.eagle import new_heads

from ...models import new_model, shared_model
from .blocks.published import random_drafter, z_lab
from .published import LAYOUTS as MEDUSA_LAYOUTS
from .published import random_heads
from .speculator import random_speculator, write


def write_medusa(target, folder):
    heads = random_heads(target.config.hidden_size, target.config.vocab_size)
    MEDUSA_LAYOUTS["pickled"](heads, folder)


def write_speculator(target, folder):
    write(random_speculator(target.config.hidden_size, target.config.vocab_size), folder)


def write_eagle(target, folder):
    new_heads(target).save_pretrained(folder)


def write_blocks(target, folder):
    z_lab(random_drafter(target.config.hidden_size, target.config.vocab_size), target.config.vocab_size, folder)


WRITERS = {
    MedusaHeads: write_medusa,
    MLPSpeculator: write_speculator,
    EagleHeads: write_eagle,
    BlockDrafter: write_blocks,
}


# MTP layers come with the target.
IN_FOLDERS = [kind for kind in KINDS if kind.drafter is not MtpLayers]


@pytest.mark.parametrize("kind", IN_FOLDERS, ids=lambda kind: kind.drafter.__name__)
def test_a_folder_is_of_one_kind_and_becomes_its_source(kind, tmp_path):
    target = shared_model("llama")
    WRITERS[kind.drafter](target, tmp_path)
    found = [other for other in KINDS if other.recognizes(str(tmp_path), config_of(str(tmp_path)))]
    assert found[0] is kind and {other.drafter for other in found[1:]} <= {EagleHeads}
    drafter = load(str(tmp_path), target)
    assert type(drafter) is kind.drafter and drafter.name_or_path == str(tmp_path)
    assert (drafter.dtype, drafter.device) == (target.dtype, target.device)
    source = source_of(drafter, Calibrator(), None)
    assert source.heads is drafter and "hidden_states" in source.needs
    with pytest.raises(ValueError, match="hidden size 48"):
        drafter.check_fit(new_model("llama", hidden_size=48, num_attention_heads=4, num_key_value_heads=2))


def test_other_folders_are_of_no_kind(tmp_path):
    target = shared_model("llama")
    assert load(str(tmp_path), target) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert load(str(tmp_path), target) is None


def test_the_config_is_asked_for_once(tmp_path, monkeypatch):
    """Of a hub id, each time may be a request; the target's own layers have none."""
    asked, find = [], files.cached_file

    def asking(name, *args, **kwargs):
        asked.append(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(files, "cached_file", asking)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    target = shared_model("llama")
    assert load(str(tmp_path), target) is None and asked == [str(tmp_path)]
    with pytest.raises(ValueError, match="no MTP layers"):
        load("mtp", target)
    assert asked == [str(tmp_path)]


def test_a_damaged_file_is_of_no_kind(tmp_path):
    """What cannot be opened is left to what loads draft models, which says so."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    target = shared_model("llama")
    assert load(str(tmp_path), target) is None
    with pytest.raises(ValueError, match="can be loaded"):
        resolve(str(tmp_path), target)
