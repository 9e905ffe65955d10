"""Models that read images: their text is packed like any other, and so is what follows an image."""

import pytest
import torch
from transformers import LogitsProcessorList

import hf_smartspec
from hf_smartspec import Engine, SeededGumbelLogitsProcessor, SmartSpecConfig
from hf_smartspec.prepare import call as call_module
from hf_smartspec.prepare import route as route_module
from hf_smartspec.prepare.media import without_empty_media
from hf_smartspec.prepare.route import Route, route_of
from hf_smartspec.target_model.compat import CACHE
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.model_state import state_of
from hf_smartspec.target_model.recurrent.functions import recurrent_layers

from ..covering import part_of
from ..generate.helpers import Oracle, Spy
from .multimodal import CONFIGS, IMAGE, build, image_batch, text_batch

NEW = 20
READS_IMAGES = ["Gemma3", "Llava", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "Idefics3", "Mistral3"]
PLANES = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v"]  # whose positions count time, height and width


@pytest.fixture
def routes(monkeypatch):
    answers: list[Route] = []
    monkeypatch.setattr(call_module, "route_of", lambda *args: answers.append(route_of(*args)) or answers[-1])
    return answers


def check(model, inputs, max_new_tokens=NEW, **ours):
    """The tokens of plain `generate`, with drafts that are right and with drafts that are wrong."""
    inputs = inputs | {"max_new_tokens": max_new_tokens}
    expected = model.generate(**inputs, **ours)
    for is_right in (True, False):
        spy = Spy(Oracle(expected, inputs["attention_mask"], is_right))
        with hf_smartspec.enabled(model):
            output = model.generate(**inputs, **ours, assistant=SmartSpecConfig(spy, num_nodes=4))
        assert torch.equal(output, expected)
        assert spy.drafted > 0 and (spy.accepted > 0) == is_right


@pytest.mark.parametrize(
    "name", part_of([name for name in CONFIGS if name != "PaliGemma"], "Gemma3", "Qwen2VL", "Llava")
)
def test_text_is_packed_like_any_other(name, routes):
    check(build(name), text_batch())
    assert routes == [Route("packed")] * 2


@pytest.mark.parametrize("name", [*PLANES, "Gemma3"])
def test_token_types_of_text_say_nothing(name, routes):
    batch = text_batch()
    key = "token_type_ids" if name == "Gemma3" else "mm_token_type_ids"
    check(build(name), batch | {key: torch.zeros_like(batch["input_ids"])})
    assert routes == [Route("packed")] * 2


def test_token_types_of_text_models_are_kept():
    """Type 0 has an embedding in GPT-2."""
    types = torch.zeros(2, 3, dtype=torch.long)
    assert without_empty_media({"token_type_ids": types}) == {"token_type_ids": types}


@pytest.mark.parametrize("rows", [(0, 1, 2), (2,)])
@pytest.mark.parametrize("name", [*READS_IMAGES, *(name for name in ("Qwen3_5", "Lfm2Vl") if name in CONFIGS)])
def test_what_follows_images_is_packed(name, rows, routes):
    check(build(name), image_batch(name, rows))
    assert routes == [Route("packed", reads_media=True)] * 2


@pytest.mark.parametrize("name", ["Gemma3", "Qwen2VL"])
def test_prompts_with_images_in_pieces(name, routes):
    check(build(name), image_batch(name), prefill_chunk_size=5)
    assert routes[0].reads_media


@pytest.mark.parametrize("name", ["Gemma3", "Llava", "Qwen2VL"])
def test_caches_and_scores_behind_images(name):
    model, batch = build(name), image_batch(name) | {"max_new_tokens": NEW}
    arguments = {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**batch, **arguments)
    with hf_smartspec.enabled(model):
        source = Oracle(expected.sequences, batch["attention_mask"])
        actual = model.generate(**batch, **arguments, assistant=SmartSpecConfig(source, num_nodes=4))
    assert actual.statistics.accepted_tokens > 0
    for logits, reference in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4)
    lengths = {output[CACHE].get_seq_length() for output in (actual, expected)}
    assert len(lengths) == 1
    for ours, theirs in zip(actual[CACHE].layers, expected[CACHE].layers, strict=True):
        shown = (batch["attention_mask"].shape[1] + NEW - 1) - theirs.keys.shape[2]
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, NEW - 1), value=1)[:, shown:].bool()
        for name in ("keys", "values"):
            pair = [getattr(layer, name).transpose(1, 2)[mask] for layer in (ours, theirs)]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen2VL"])
def test_sampling_behind_images(name):
    model, batch = build(name), image_batch(name) | {"max_new_tokens": NEW}
    noise = LogitsProcessorList([SeededGumbelLogitsProcessor([1, 2, 3])])
    expected = model.generate(**batch, logits_processor=noise)
    spy = Spy(Oracle(expected, batch["attention_mask"]))
    with hf_smartspec.enabled(model):
        assistant = SmartSpecConfig(spy, num_nodes=4)
        output = model.generate(**batch, do_sample=True, top_k=0, seed=[1, 2, 3], assistant=assistant)
    assert torch.equal(output, expected) and spy.accepted > 0


def test_images_at_the_end_of_a_prompt_are_left_to_plain_decoding(routes):
    model, batch = build("Llava"), image_batch("Llava")
    batch["input_ids"][0, 6:10], batch["input_ids"][0, -4:] = 5, IMAGE
    expected = model.generate(**batch, max_new_tokens=6)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**batch, max_new_tokens=6, assistant="prompt_lookup"), expected)
    assert routes[0].way == "plain" and "ends in an image" in routes[0].reason


@pytest.mark.skipif("Qwen3_5" not in CONFIGS, reason="hybrids are not packed in this release")
def test_images_before_states_of_other_forms_are_left_to_plain_decoding(routes, monkeypatch):
    def of_another_form(model):
        layers = recurrent_layers(model)
        layers.may_be_loaded = False
        return layers

    monkeypatch.setattr(route_module, "recurrent_layers", of_another_form)
    model, batch = build("Qwen3_5"), image_batch("Qwen3_5")
    expected = model.generate(**batch, max_new_tokens=6)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**batch, max_new_tokens=6, assistant="prompt_lookup"), expected)
    assert routes[0].way == "plain" and "prompts with images" in routes[0].reason


def test_prompts_that_are_read_both_ways_are_left_to_plain_decoding(routes):
    """PaliGemma's prompts are no causal texts."""
    model, batch = build("PaliGemma"), image_batch("PaliGemma")
    expected = model.generate(**batch, max_new_tokens=6)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**batch, max_new_tokens=6, assistant="prompt_lookup"), expected)
    assert routes[0].way == "plain"


@pytest.mark.parametrize("name", ["Qwen2VL", "Gemma3"])
@pytest.mark.parametrize("lengths", [(7, 12, 10, 4), (9,), (6, 6)])
def test_text_row_by_row(name, lengths, routes, monkeypatch):
    """Four rows and four planes of positions must not be mistaken for one another."""
    model = build(name)
    monkeypatch.setitem(state_of(model).obstacles, (PackedForward, False), "its trees are left unpacked")
    check(model, text_batch(lengths))
    assert {route.way for route in routes} == {"rowwise"}


@pytest.mark.parametrize("name", ["Gemma3", "Qwen2VL"])
def test_text_in_an_engine(name):
    model, batch = build(name), text_batch()
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
    expected = model.generate(**batch, max_new_tokens=NEW)
    spy = Spy(Oracle(expected, batch["attention_mask"]))
    with Engine(model, SmartSpecConfig(spy, num_nodes=4)) as engine:
        outputs = engine.generate(prompts, max_new_tokens=NEW)
        with pytest.raises(ValueError, match="images and the like are read by `generate` only"):
            image = image_batch(name, (0,))
            engine.add_request(image.pop("input_ids")[0], **image | {"attention_mask": None, "max_new_tokens": 4})
    width = batch["input_ids"].shape[1]
    assert [output.generated_tokens for output in outputs] == expected[:, width:].tolist()
    assert spy.accepted > 0
