"""`generate_batch` of an enabled model: what transformers returns, with the tokens of `generate`."""

import copy
import pickle

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin

import hf_smartspec
from hf_smartspec import DraftModelCandidates
from hf_smartspec.serving.transformers_batching.manager import SpeculativeBatchingManager
from hf_smartspec.target_model.compat import RequestStatus
from hf_smartspec.target_model.model_state import state_of

from ...generate.helpers import EOS, PAD, Spy, noisy_copy, prompts, set_special_tokens, tiny_llama
from ...models import new_model
from ..helpers import suffix

LENGTHS = [5, 9, 3, 12, 7]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20}
SMALL = {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 256}


@pytest.fixture
def model():
    return tiny_llama()


def rows(inputs):
    return [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"])]


INPUTS = prompts(LENGTHS)
PROMPTS = rows(INPUTS)


def completions(model, config, **options):
    """Return the texts of one batch of `generate`, up to their ends."""
    texts = model.generate(**INPUTS, generation_config=config, **options)[:, INPUTS["input_ids"].shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in texts]


def tokens(found):
    assert all(output.error is None for output in found.values())
    return [output.generated_tokens for output in found.values()]


def test_greedy_tokens_and_fields_are_those_of_transformers(model):
    config = GenerationConfig(**GREEDY)
    own = model.generate_batch(
        PROMPTS, config, record_timestamps=True, continuous_batching_config=ContinuousBatchingConfig(**SMALL)
    )
    spy = Spy(DraftModelCandidates(noisy_copy(model)))
    hf_smartspec.enable(model, assistant=spy)
    found = model.generate_batch(PROMPTS, config, record_timestamps=True)
    assert list(found) == list(own) and tokens(found) == tokens(own) == completions(model, config, assistant="none")
    assert spy.drafted > 0 and spy.accepted > 0
    for output, other in zip(found.values(), own.values()):
        assert (output.request_id, output.prompt_ids) == (other.request_id, other.prompt_ids)
        assert output.is_finished() and output.status is RequestStatus.FINISHED
        assert len(output.timestamps) == len(output.generated_tokens) and output.timestamps == sorted(output.timestamps)
        assert output.created_time <= output.lifespan[0] <= output.timestamps[0] <= output.lifespan[1]
    assert model.smartspec_statistics.last.generated_tokens > 0


@pytest.mark.parametrize("copies", [1, 3])
def test_sampled_tokens_are_those_of_one_batch_of_generate(model, copies):
    config = GenerationConfig(**SAMPLED, num_return_sequences=copies)
    with hf_smartspec.enabled(model):
        expected = completions(model, config, seed=7)
        assert tokens(model.generate_batch(PROMPTS, config, seed=7, assistant=suffix())) == expected
        assert tokens(model.generate_batch(PROMPTS, config, seed=7)) == expected  # served without drafts
        assert tokens(model.generate_batch(PROMPTS, config, seed=8)) != expected
        options = ContinuousBatchingConfig(seed=7)
        assert tokens(model.generate_batch(PROMPTS, config, options, assistant="suffix")) == expected
        torch.manual_seed(3)
        expected = completions(model, config, assistant="none")
        torch.manual_seed(3)
        found = model.generate_batch(PROMPTS, config, assistant=suffix())
    assert tokens(found) == expected
    names = [f"req_0__child#{number}" for number in range(copies - 1)]
    assert list(found)[:copies] == [*names, "req_0"]


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_log_probabilities_are_those_of_the_processed_scores(model, settings):
    config, options = GenerationConfig(**settings), ContinuousBatchingConfig(**SMALL, return_logprobs=True)
    if settings is GREEDY:
        own = model.generate_batch(PROMPTS, config, options)
    with hf_smartspec.enabled(model):
        spy = Spy(DraftModelCandidates(noisy_copy(model)))
        found = model.generate_batch(PROMPTS, config, options, assistant=spy, seed=[4] * 5)
        assert tokens(found) == completions(model, config, seed=[4] * 5) and spy.accepted > 0
        for prompt, output in zip(PROMPTS, found.values()):
            ids = torch.tensor([prompt])
            options = {**settings, "return_dict_in_generate": True, "output_scores": True}
            texts = model.generate(ids, attention_mask=torch.ones_like(ids), **options, seed=4, assistant="none")
            scores = torch.stack(texts.scores)[:, 0].log_softmax(-1)
            wanted = scores.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(output.logprobs), wanted, atol=1e-5)
    if settings is GREEDY:
        for output, other in zip(found.values(), own.values()):
            assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_each_prompt_may_have_a_seed_of_its_own(model):
    config = GenerationConfig(**SAMPLED)
    with hf_smartspec.enabled(model, assistant="suffix"):
        found = model.generate_batch(PROMPTS, config, seed=[9, 8, 9, 6, 5])
        assert tokens(found) == completions(model, config, seed=[9, 8, 9, 6, 5])
        with pytest.raises(ValueError, match="`seed` must be one integer or one per row: got 2 for 5 rows"):
            model.generate_batch(PROMPTS, config, seed=[1, 2])


def test_arguments_of_generate_count_which_transformers_ignores(model):
    with hf_smartspec.enabled(model, assistant="suffix"):
        options = {"do_sample": True, "temperature": 0.7, "seed": 3}
        found = model.generate_batch(PROMPTS, GenerationConfig(**GREEDY), **options)
        assert tokens(found) == completions(
            model, GenerationConfig(**{**SAMPLED, "temperature": 0.7, "top_k": 50}), seed=3
        )
        found = model.generate_batch(PROMPTS, GenerationConfig(**GREEDY), max_new_tokens=3)
        assert tokens(found) == completions(model, GenerationConfig(**{**GREEDY, "max_new_tokens": 3}))


def test_default_config_and_no_prompts(model):
    model.generation_config.max_new_tokens = 6
    with hf_smartspec.enabled(model, assistant="suffix"):
        assert model.generate_batch([]) == {}
        assert tokens(model.generate_batch(PROMPTS)) == completions(model, None, assistant="none")


def test_changed_weights_are_noticed_by_a_manager_that_was_kept(model):
    config, options = GenerationConfig(**GREEDY), {"persistent_manager": True}
    with hf_smartspec.enabled(model, assistant="suffix"):
        first = tokens(model.generate_batch(PROMPTS, config, **options))
        kept = state_of(model).manager
        assert model.init_continuous_batching() is kept
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        second = tokens(model.generate_batch(PROMPTS, config, **options))
        assert state_of(model).manager is kept
        assert first != second == completions(model, config, assistant="none")
        model.train()
        third = tokens(model.generate_batch(PROMPTS, GenerationConfig(**SAMPLED), seed=2, **options))
        assert not model.training  # as with transformers' own
        assert third == completions(model, GenerationConfig(**SAMPLED), seed=2)
        copied = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert all(tokens(item.generate_batch(PROMPTS, config)) == second for item in copied)
        model.destroy_cached_continuous_batching_manager()
        assert model.init_continuous_batching(assistant="suffix") is not kept


def test_what_no_engine_serves_is_left_to_transformers_or_refused(model, caplog):
    config = GenerationConfig(**GREEDY, num_beams=2)
    with hf_smartspec.enabled(model, assistant="suffix"):
        manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
        assert isinstance(manager, SpeculativeBatchingManager)
        assert not isinstance(model.init_continuous_batching(config), SpeculativeBatchingManager)
        assert "LlamaForCausalLM is left to transformers: `assistant` serves greedy search" in caplog.text
        with pytest.raises(ValueError, match="beam search"):
            model.init_continuous_batching(config, assistant="suffix")
        with pytest.raises(ValueError, match="beam search"), model.continuous_batching_context_manager(config, seed=1):
            raise AssertionError("nothing runs")
        with pytest.raises(ValueError, match="'misspelt'"):
            model.generate_batch(PROMPTS, GenerationConfig(**GREEDY), assistant="suffix", misspelt=1)


def test_models_whose_requests_share_no_forward_are_left_to_transformers(caplog):
    model = hf_smartspec.enable(set_special_tokens(new_model("bloom"), EOS), assistant="suffix")
    assert not isinstance(model.init_continuous_batching(GenerationConfig(**GREEDY)), SpeculativeBatchingManager)
    assert "BloomForCausalLM is left to transformers: Its requests cannot share forwards" in caplog.text
    config = GenerationConfig(**GREEDY)
    found = model.generate_batch(PROMPTS, config, assistant="prompt_lookup")  # asked for: row by row
    assert tokens(found) == completions(model, config, assistant="none")


def test_enabling_is_taken_back_wholly(model):
    names = ["generate_batch", "continuous_batching_context_manager", "init_continuous_batching"]
    before, attributes = [getattr(GenerationMixin, name) for name in names], vars(model).keys() - set()
    config = GenerationConfig(**GREEDY)
    with hf_smartspec.enable(assistant="suffix"):
        assert isinstance(model.init_continuous_batching(config), SpeculativeBatchingManager)
        hf_smartspec.enable(model, assistant="prompt_lookup")
        assert model.init_continuous_batching(config).assistant == "prompt_lookup"
        with hf_smartspec.enabled(model, assistant="none"):
            assert model.init_continuous_batching(config).assistant == "none"
        assert model.init_continuous_batching(config).assistant == "prompt_lookup"
    assert model.init_continuous_batching(config).assistant == "prompt_lookup"
    hf_smartspec.disable(model)
    assert [getattr(GenerationMixin, name) for name in names] == before
    assert not {"generate_batch", "init_continuous_batching"} & vars(GenerationMixin).keys()
    assert vars(model).keys() == attributes
    assert not isinstance(model.init_continuous_batching(config), SpeculativeBatchingManager)


def test_configs_name_assistants_too(model):
    config = GenerationConfig(**GREEDY)
    config.assistant = "suffix"
    hf_smartspec.enable(model)
    assert model.init_continuous_batching(config).assistant == "suffix"
    assert not isinstance(model.init_continuous_batching(GenerationConfig(**GREEDY)), SpeculativeBatchingManager)
