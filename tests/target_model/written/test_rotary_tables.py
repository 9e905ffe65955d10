"""Rotary embeddings that are looked up: those that the model's own module computes, to the last bit."""

import pytest
import torch

from hf_smartspec.target_model.written import written_decoder

from ...models import new_model


def pairs(decoder, positions, dtype):
    """Embeddings of the decoder, and those that the module computes."""
    x, places = torch.zeros(len(positions), 32, dtype=dtype), torch.tensor([positions])
    own, expected = decoder.tables(x, places), decoder._computed_tables(x, places)
    assert own.keys() == expected.keys() and own
    return [pair for name in own for pair in zip(own[name], expected[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_they_are_those_of_the_module_whatever_the_order_and_number_of_positions(name, dtype):
    model = new_model(name)
    decoder = written_decoder(model)
    for positions in ([0], [7, 3, 7], [300], [5, 299, 2000], list(range(90))):
        assert all(torch.equal(*pair) for pair in pairs(decoder, positions, dtype))


def test_a_module_is_not_called_for_positions_that_are_known(monkeypatch):
    model, computed, x = new_model("llama"), [], torch.zeros(1, 32)
    decoder, forward = written_decoder(model), type(model.model.rotary_emb).forward
    decoder.tables(x, torch.tensor([[4]]))
    monkeypatch.setattr(
        type(model.model.rotary_emb), "forward", lambda self, *args: computed.append(self) or forward(self, *args)
    )
    for position in range(40):
        decoder.tables(x, torch.tensor([[position]]))
    assert not computed
    decoder.tables(x, torch.tensor([[1000]]))
    assert computed


def test_a_hooked_module_is_called():
    model = new_model("llama")
    decoder, x, place = written_decoder(model), torch.zeros(1, 32), torch.tensor([[4]])
    before = decoder.tables(x, place)[None][0]
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: (output[0] + 1, output[1]))
    assert torch.equal(decoder.tables(x, place)[None][0], before + 1)


def test_changed_frequencies_are_noticed():
    model = new_model("llama")
    decoder = written_decoder(model)
    pairs(decoder, [3, 9], torch.float32)
    model.model.rotary_emb.inv_freq.mul_(2)
    assert all(torch.equal(*pair) for pair in pairs(decoder, [3, 9], torch.float32))
    for _ in range(3):  # new tensors, which may lie where earlier ones did
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 1.5
        assert all(torch.equal(*pair) for pair in pairs(decoder, [3, 9], torch.float32))
    model.model.rotary_emb.inv_freq.data.mul_(2)  # not counted by torch: found when the model is used anew
    written_decoder(model, thoroughly=True)
    assert all(torch.equal(*pair) for pair in pairs(decoder, [3, 9], torch.float32))


def test_embeddings_that_depend_on_the_length_are_computed_each_time():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = new_model("llama", max_position_embeddings=16, rope_parameters=rope)
    assert not written_decoder(model)._known._may_keep


def test_torchs_default_device_does_not_matter():
    model = new_model("llama")
    decoder, x, place = written_decoder(model), torch.zeros(1, 32), torch.tensor([[4]])
    with torch.device("meta"):
        tables = decoder.tables(x, place)
    assert all(part.device.type == "cpu" for pair in tables.values() for part in pair)
