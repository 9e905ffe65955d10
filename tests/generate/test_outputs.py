"""Outputs of `return_dict_in_generate`: scores, logits, statistics; and `custom_generate`."""

import pytest
import torch
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteria

import hf_smartspec

from .helpers import EOS, VOCAB_SIZE, Oracle, check_same, noisy_copy, prompts

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
PROMPT_LENGTH = IDS.shape[1]
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class Ends(StoppingCriteria):
    """Every row at a length of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - PROMPT_LENGTH >= torch.tensor([3, 14, 8, 1])


def check_records(model, make, source=None, **ours):
    """Scores and logits of every row and step, those of finished rows included, are plain decoding's."""
    build = make if callable(make) else lambda: make
    plain = model.generate(**build())
    output, _ = check_same(model, make, source=source, **ours)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    for name in ("scores", "logits"):
        expected, actual = getattr(plain, name), getattr(output, name)
        assert len(actual) == len(expected) == output.sequences.shape[1] - PROMPT_LENGTH
        for step, (line, wanted) in enumerate(zip(actual, expected)):
            assert line.dtype == torch.float32 and line.shape == (len(plain.sequences), VOCAB_SIZE)
            torch.testing.assert_close(line, wanted, atol=2e-5, rtol=1e-5, msg=f"{name} of step {step}")
    return output


@pytest.mark.parametrize("eos", [None, EOS, [EOS, 8, 12, 26]], ids=["no_eos", "eos", "many_eos"])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2)], ids=["batch", "one"])
def test_scores_and_logits(model, eos, rows):
    batch = {"input_ids": IDS[rows], "attention_mask": MASK[rows]}
    check_records(model, batch | EVERYTHING | {"max_new_tokens": 25, "eos_token_id": eos})


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
        {"suppress_tokens": [18], "renormalize_logits": True},
        {"min_new_tokens": 8, "bad_words_ids": [[26, 9]]},
        {"guidance_scale": 1.5},
    ],
)
def test_scores_are_processed_and_logits_are_not(model, settings):
    model.generation_config.eos_token_id = [EOS, 8, 12, 26]
    output = check_records(model, BATCH | EVERYTHING | {"max_new_tokens": 25} | settings)
    assert not torch.equal(torch.stack(output.scores), torch.stack(output.logits))


def test_scores_of_finished_rows_under_processors_with_state(model):
    """Plain decoding goes on showing finished rows to the processors."""
    model.generation_config.eos_token_id = [EOS, 8, 12, 26]

    class Falling:
        def __init__(self):
            self.total = torch.zeros(VOCAB_SIZE)

        def __call__(self, input_ids, scores):
            self.total = self.total + scores.softmax(-1).sum(0)
            return scores - 0.1 * self.total

    def make():
        return BATCH | EVERYTHING | {"max_new_tokens": 25, "logits_processor": [Falling()]}

    output = check_records(model, make)
    known = Oracle(output.sequences, MASK)
    output = check_records(model, make, source=known)
    assert output.statistics.mean_accepted_length > 1.5


def test_scores_of_rows_that_a_criterion_stops(model):
    for eos in (EOS, None):
        settings = {"max_new_tokens": 20, "stopping_criteria": [Ends()], "eos_token_id": eos}
        known = model.generate(**BATCH, max_new_tokens=20, eos_token_id=None)
        check_records(model, BATCH | EVERYTHING | settings, source=Oracle(known, MASK))


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_one_of_them_alone(model, name):
    settings = BATCH | {"return_dict_in_generate": True, name: True, "max_new_tokens": 12}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    for field in ("scores", "logits"):
        assert (getattr(output, field) is None) == (getattr(plain, field) is None)


def test_nothing_is_recorded_without_return_dict(model):
    output, _ = check_same(model, BATCH | EVERYTHING | {"max_new_tokens": 8, "return_dict_in_generate": False})
    assert isinstance(output, torch.Tensor)


def test_transition_scores(model):
    settings = BATCH | EVERYTHING | {"max_new_tokens": 12}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    expected, actual = (
        model.compute_transition_scores(item.sequences, item.scores, normalize_logits=True) for item in (plain, output)
    )
    torch.testing.assert_close(actual, expected)


def test_the_output_is_transformers_own_with_statistics(model):
    settings = BATCH | {"return_dict_in_generate": True, "max_new_tokens": 12}
    plain = model.generate(**settings)
    output, _ = check_same(model, settings)
    assert isinstance(output, type(plain))
    assert set(output.keys()) - set(plain.keys()) == {"statistics"}
    assert output["sequences"] is output.sequences is output[0]
    assert output.attentions is None and output.hidden_states is None


def test_statistics(model):
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=20)
    hf_smartspec.enable(model)
    kwargs = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True}
    statistics = model.generate(**kwargs, assistant=Oracle(known, MASK), num_assistant_tokens=4).statistics
    assert (statistics.steps, statistics.forwards) == (16, 4)  # 4 rows, blocks of 5
    assert statistics.drafted_tokens == statistics.accepted_tokens == 64
    assert statistics.generated_tokens == 80
    assert statistics.acceptance_rate == 1 and statistics.mean_accepted_length == 5
    wrong = model.generate(**kwargs, assistant=Oracle(known, MASK, is_right=False)).statistics
    assert (wrong.steps, wrong.forwards, wrong.accepted_tokens) == (80, 20, 0)
    assert wrong.acceptance_rate == 0 and wrong.mean_accepted_length == 1
    none = model.generate(**kwargs, assistant="none").statistics
    assert (none.steps, none.drafted_tokens, none.acceptance_rate) == (80, 0, 0)
    parts = [getattr(statistics, f"seconds_{name}") for name in ("draft", "select", "forward", "verify", "observe")]
    assert all(part >= 0 for part in parts) and 0 < sum(parts) <= statistics.seconds_total
    assert statistics.goodput == pytest.approx(80 / statistics.seconds_total)
    total = statistics + wrong
    assert total.generated_tokens == 160 and total.steps == 96
    names = {"steps", "drafted_tokens", "accepted_tokens", "generated_tokens", "acceptance_rate", "goodput"}
    assert names | {"mean_accepted_length"} <= statistics.as_dict().keys()


def test_generated_tokens_are_counted_up_to_each_rows_end(model):
    model.generation_config.eos_token_id = [EOS, 8, 12]
    output, _ = check_same(model, BATCH | {"max_new_tokens": 30, "return_dict_in_generate": True})
    new = output.sequences[:, PROMPT_LENGTH:]
    ends = torch.isin(new, torch.tensor([EOS, 8, 12]))
    expected = sum(int(row.nonzero()[0]) + 1 if row.any() else len(row) for row in ends)
    assert output.statistics.generated_tokens == expected


def test_statistics_of_plainly_served_calls(model):
    """Whoever reads statistics finds them, whichever way the call was served."""
    model.generation_config.eos_token_id = [EOS, 8, 12]
    settings = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True}
    served, _ = check_same(model, settings)
    with hf_smartspec.enabled(model):
        plainly = model.generate(**settings, output_hidden_states=True, assistant="prompt_lookup")
    assert torch.equal(plainly.sequences, served.sequences)
    assert plainly.statistics.generated_tokens == served.statistics.generated_tokens
    assert plainly.statistics.drafted_tokens == 0
    assert plainly.statistics.steps == plainly.statistics.generated_tokens
    assert plainly.statistics.forwards == served.sequences.shape[1] - PROMPT_LENGTH


# `custom_generate`, without the patch


def test_custom_generate_callable(model, draft):
    settings = BATCH | {"max_new_tokens": 16, "repetition_penalty": 1.3}
    expected = model.generate(**settings)
    for assistant in ("prompt_lookup", draft, hf_smartspec.SmartSpecConfig(draft, width=2)):
        output = model.generate(
            **settings, custom_generate=hf_smartspec.decode, assistant=assistant, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, expected)
        if assistant != "prompt_lookup":
            assert output.statistics.accepted_tokens > 0
    assert torch.equal(model.generate(**settings, custom_generate=hf_smartspec.decode), expected)


def test_custom_generate_callable_samples_with_a_seed(model, draft):
    settings = BATCH | {"max_new_tokens": 16, "do_sample": True, "seed": 3}
    output = model.generate(**settings, custom_generate=hf_smartspec.decode, assistant=draft)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**settings, assistant=noisy_copy(model)), output)
