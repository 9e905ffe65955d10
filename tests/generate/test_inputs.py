"""How a prompt, its padding and the settings may be passed: every way gives plain decoding's tokens."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import hf_smartspec
from hf_smartspec import SmartSpecConfig

from ..models import new_model
from .helpers import BOS, EOS, PAD, Oracle, Spy, check_same, draft_source, noisy_copy, prompts, tiny_llama

BATCH = prompts([5, 9, 1, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]


@pytest.fixture
def source(model):
    return Spy(draft_source(model))


@pytest.mark.parametrize("way", ["positional", "inputs", "input_ids"])
def test_ways_to_pass_the_prompt(model, source, way):
    expected = model.generate(IDS, attention_mask=MASK, max_new_tokens=12)
    hf_smartspec.enable(model)
    kwargs = {"attention_mask": MASK, "max_new_tokens": 12, "assistant": source}
    if way == "positional":
        actual = model.generate(IDS, GenerationConfig(max_new_tokens=12), attention_mask=MASK, assistant=source)
    else:
        actual = model.generate(**{way: IDS}, **kwargs)
    assert torch.equal(actual, expected)
    assert source.accepted > 0


@pytest.mark.parametrize("batch", [[6], [3, 3, 3], [1, 1], [1, 12, 4], [2, 30]])
def test_left_padded_batches(model, batch):
    check_same(model, prompts(batch) | {"max_new_tokens": 24})


def test_mask_is_inferred_from_padding(model):
    without = check_same(model, {"input_ids": IDS, "max_new_tokens": 16})[0]
    with_mask = check_same(model, {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 16})[0]
    assert torch.equal(without, with_mask)


def test_mask_cannot_be_inferred_where_padding_is_eos(model):
    """Plain decoding then attends to the padding, and so do we."""
    check_same(model, {"input_ids": IDS, "max_new_tokens": 16, "pad_token_id": EOS, "eos_token_id": EOS})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_mask_dtypes(model, dtype):
    check_same(model, {"input_ids": IDS, "attention_mask": MASK.to(dtype), "max_new_tokens": 10})


def test_int32_prompts(model):
    output, _ = check_same(model, {"input_ids": IDS.int(), "attention_mask": MASK, "max_new_tokens": 10})
    assert output.dtype == torch.int64


@pytest.mark.parametrize("mask_of", [MASK, torch.ones_like(MASK)], ids=["padded", "full"])
def test_masks_with_holes(model, mask_of):
    mask = mask_of.clone()
    mask[1, [2, 3, 6]] = 0
    mask[3, 5] = 0
    check_same(model, {"input_ids": IDS.clamp(min=3), "attention_mask": mask, "max_new_tokens": 20})


def test_a_full_mask_equals_none(model):
    inputs = prompts([6, 6])
    check_same(model, inputs | {"max_new_tokens": 10})
    check_same(model, {"input_ids": inputs["input_ids"], "max_new_tokens": 10})


def test_right_padded_batches_are_served_plainly(model, source):
    ids, mask = IDS.flip(1), MASK.flip(1)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    with hf_smartspec.enabled(model):
        actual = model.generate(ids, attention_mask=mask, max_new_tokens=8, assistant=source)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("rows", [[0], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("is_inferred", [True, False])
def test_rows_that_are_masked_wholly_are_served_plainly(model, source, rows, is_inferred):
    """Plain decoding accepts them, whatever it makes of them."""
    ids, mask = IDS.clone(), MASK.clone()
    ids[rows], mask[rows] = PAD, 0
    inputs = {"input_ids": ids, "max_new_tokens": 8} | ({} if is_inferred else {"attention_mask": mask})
    expected = model.generate(**inputs)
    with hf_smartspec.enabled(model):
        actual = model.generate(**inputs, assistant=source, return_dict_in_generate=True)
    assert torch.equal(actual.sequences, expected)
    assert source.drafted == 0 and actual.statistics.generated_tokens > 0


@pytest.mark.parametrize("assistant", ["auto", "none", "prompt_lookup"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom", "t5", "bart"])  # packed, row by row, encoders
def test_empty_prompts_raise_what_plain_decoding_raises(architecture, rows, assistant):
    model = new_model(architecture)
    ids = torch.zeros((rows, 0), dtype=torch.long)
    for name in ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",):
        inputs = {"input_ids": torch.ones((rows, 3), dtype=torch.long), name: ids, "max_new_tokens": 4}
        with pytest.raises(Exception) as expected:  # the architecture's own kind
            model.generate(**inputs)
        with hf_smartspec.enabled(model), pytest.raises(expected.type) as actual:
            model.generate(**inputs, assistant=assistant)
        assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("architecture", ["llama", "bloom", "llama4_text"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": MASK * 2},
        {"attention_mask": MASK * 0.7},
        {"attention_mask": torch.ones_like(MASK)[:1]},
        {"attention_mask": torch.ones_like(MASK)[:3]},
        {"position_ids": torch.arange(7).expand(4, 7)},
        {"position_ids": torch.arange(9).expand(3, 9)},
        {"max_new_tokens": 3.5},
    ],
    ids=["twos", "fractions", "one_row", "rows", "short_positions", "rows_of_positions", "half_a_token"],
)
def test_odd_inputs_give_what_plain_decoding_gives(architecture, inputs):
    """Its tokens, or its error."""
    model = new_model(architecture)
    inputs = {"input_ids": IDS, "max_new_tokens": 6} | inputs
    outcomes = []
    for assistant in ({}, {"assistant": "prompt_lookup"}, {"assistant": "none"}):
        try:
            with hf_smartspec.enabled(model):
                outcomes.append(model.generate(**inputs, **assistant).tolist())
        except (RuntimeError, TypeError) as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[1:] == outcomes[:1] * 2


def test_without_a_prompt_generation_begins_at_bos(model):
    output, _ = check_same(model, {"max_new_tokens": 12}, source=Oracle(model.generate(max_new_tokens=12)))
    assert output[0, 0] == BOS


def test_inputs_embeds_are_served_plainly(model, source):
    embeds = model.get_input_embeddings()(prompts([6, 6])["input_ids"])
    expected = model.generate(inputs_embeds=embeds, max_new_tokens=8)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=8, assistant=source), expected)


def test_position_ids_of_the_caller(model):
    inputs = prompts([6, 6])
    positions = torch.arange(6).expand(2, 6)
    check_same(model, inputs | {"position_ids": positions, "max_new_tokens": 12})
    check_same(model, inputs | {"position_ids": positions + 3, "max_new_tokens": 12})


def test_generation_config_object(model):
    config = GenerationConfig(max_new_tokens=14, repetition_penalty=1.3, no_repeat_ngram_size=3)
    check_same(model, BATCH | {"generation_config": config})


def test_generation_config_object_is_completed_by_the_models_defaults(model):
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.max_new_tokens = 9
    output, _ = check_same(model, BATCH | {"generation_config": GenerationConfig(no_repeat_ngram_size=2)})
    assert output.shape[1] <= IDS.shape[1] + 9


def test_default_length(model):
    model.generation_config.eos_token_id = None
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
        output, _ = check_same(model, BATCH)
    assert output.shape[1] == IDS.shape[1] + 20


def test_more_than_512_prompt_tokens_are_fed_in_chunks(model):
    model = tiny_llama(max_position_embeddings=2048)
    check_same(model, prompts([700, 30, 513]) | {"max_new_tokens": 8})
    check_same(model, prompts([40, 7, 33]) | {"max_new_tokens": 8, "prefill_chunk_size": 16})


def test_num_assistant_tokens_say_how_much_is_drafted(model):
    known = model.generate(**BATCH, max_new_tokens=12, eos_token_id=None)
    drafted = {}
    hf_smartspec.enable(model)

    def run(**kwargs):
        spy = Spy(Oracle(known, MASK))
        spy_sizes = []
        propose = spy.propose
        spy.propose = lambda ids, limits: (spy_sizes.extend(limits), propose(ids, limits))[1]
        assistant = kwargs.pop("config", lambda source: source)(spy)
        output = model.generate(**BATCH, eos_token_id=None, **kwargs, assistant=assistant)
        assert torch.equal(output, known)
        assert spy.accepted > 0
        return set(spy_sizes)

    drafted["default"] = run(max_new_tokens=12)
    drafted["keyword"] = run(max_new_tokens=12, num_assistant_tokens=2)
    drafted["config"] = run(max_new_tokens=12, config=lambda source: SmartSpecConfig(source, num_nodes=3))
    assert drafted == {"default": {4}, "keyword": {2}, "config": {3}}


def test_num_assistant_tokens_of_a_config_object(model):
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=12)
    hf_smartspec.enable(model)
    forwards = []
    for num_nodes in (None, 1, 11):
        config = GenerationConfig(max_new_tokens=12, num_assistant_tokens=num_nodes, return_dict_in_generate=True)
        output = model.generate(**BATCH, generation_config=config, assistant=Oracle(known, MASK))
        assert torch.equal(output.sequences, known)
        forwards.append(output.statistics.forwards)
    assert forwards == [3, 6, 1]  # 12 tokens in blocks of 5, 2 and 12


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 7, 40])
def test_any_number_of_nodes(model, num_nodes):
    known = model.generate(**BATCH, max_new_tokens=20)
    with hf_smartspec.enabled(model):
        spy = Spy(Oracle(known, MASK))
        output = model.generate(**BATCH, max_new_tokens=20, assistant=spy, num_assistant_tokens=num_nodes)
    assert torch.equal(output, known)
    assert (spy.accepted > 0) == (num_nodes > 0)


@pytest.mark.parametrize("is_right", [True, False])
def test_every_length_with_all_and_no_drafts_accepted(model, is_right):
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=12)
    hf_smartspec.enable(model)
    for length in range(1, 13):
        source = Oracle(known, MASK, is_right)
        output = model.generate(**BATCH, max_new_tokens=length, assistant=source, return_dict_in_generate=True)
        assert torch.equal(output.sequences, known[:, : IDS.shape[1] + length])
        statistics = output.statistics
        assert (statistics.drafted_tokens > 0) == (length > 1)  # the last token needs no draft
        assert statistics.accepted_tokens == (statistics.drafted_tokens if is_right else 0)
        assert statistics.generated_tokens == 4 * length


@pytest.mark.parametrize("width", [1, 2, 3])
def test_draft_models_draft_chains_and_trees(model, width):
    spy = Spy(draft_source(model, num_nodes=8, width=width))
    check_same(model, BATCH | {"max_new_tokens": 24}, source=spy)
    config = SmartSpecConfig(noisy_copy(model), num_nodes=6, width=width)
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=24, assistant=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**BATCH, max_new_tokens=24))
    assert output.statistics.accepted_tokens > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    """In low precision, tokens may differ from plain decoding's only where its two best scores are nearly tied."""
    model = tiny_llama().to(dtype)
    plain = model.generate(**BATCH, max_new_tokens=16, output_logits=True, return_dict_in_generate=True)
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=16, assistant=noisy_copy(model), return_dict_in_generate=True)
    assert output.statistics.accepted_tokens > 0
    for row, (ids, expected) in enumerate(zip(output.sequences, plain.sequences)):
        length = min(len(ids), len(expected))
        different = (ids[:length] != expected[:length]).nonzero()
        if len(different):
            best = plain.logits[int(different[0]) - IDS.shape[1]][row].topk(2).values
            assert best[0] - best[1] < 0.05


def test_a_call_leaves_its_arguments_as_they_were(model):
    inputs = {key: value.clone() for key, value in BATCH.items()}
    config = GenerationConfig(max_new_tokens=6, bad_words_ids=[[5], [7, 8]], eos_token_id=[EOS, 9])
    before = copy.deepcopy(vars(config))
    processors, criteria = [], []
    with hf_smartspec.enabled(model):
        model.generate(
            **inputs,
            generation_config=config,
            assistant="prompt_lookup",
            logits_processor=processors,
            stopping_criteria=criteria,
        )
    assert all(torch.equal(inputs[key], BATCH[key]) for key in BATCH)
    assert vars(config) == before
    assert processors == [] and criteria == []


def test_two_calls_with_one_source(model, source):
    first = prompts([4, 7], seed=5)
    check_same(model, first | {"max_new_tokens": 10}, source=source)
    check_same(model, BATCH | {"max_new_tokens": 10}, source=source.source)


def test_loaded_models(model, tmp_path):
    model.save_pretrained(tmp_path)
    check_same(LlamaForCausalLM.from_pretrained(tmp_path), BATCH | {"max_new_tokens": 10})
    check_same(LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), BATCH | {"max_new_tokens": 10})


def test_pad_token_is_derived_from_eos(model):
    model.generation_config.pad_token_id = None
    inputs = prompts([6, 6, 6, 6], seed=3)
    plain = model.generate(**inputs, max_new_tokens=40, eos_token_id=None)
    eos = int(plain[0, 12])
    output, _ = check_same(model, inputs | {"max_new_tokens": 40, "eos_token_id": eos})
    assert (output[0] == eos).sum() > 1
    assert PAD not in output[0].tolist()
