"""Random combinations of everything that `generate` takes, each compared with plain decoding in all that it shows."""

import random

import pytest
import torch
from transformers import StoppingCriteria

import hf_smartspec
from hf_smartspec import SeededGumbelLogitsProcessor
from hf_smartspec.target_model.compat import CACHE

from ..covering import IS_EXHAUSTIVE
from .helpers import VOCAB_SIZE, Oracle, Spy, draft_source, prompts, tiny_llama
from .mixin import gemma3, gpt2
from .test_streaming import Recorder

NUM_CASES = 400 if IS_EXHAUSTIVE else 40
MODELS = {"llama": tiny_llama, "gemma3": gemma3, "gpt2": gpt2}


@pytest.fixture(scope="module")
def models():
    built = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        built[name] = make().eval()
        built[name].generation_config.update(pad_token_id=0, bos_token_id=2, eos_token_id=None)
    return built


class RowEnds(StoppingCriteria):
    """Stops each row at its own length, or when it says one token twice."""

    def __init__(self, log, ends):
        self.log, self.ends, self.num_calls = log, torch.tensor(ends), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls += 1
        self.log.append(("criterion", input_ids.tolist(), scores is None or len(scores)))
        return (self.num_calls >= self.ends) | (input_ids[:, -1] == input_ids[:, -2])


def draw(seed):
    """A case: a function that makes the arguments of a call anew, and what varies beside them."""
    rng = random.Random(seed)
    maybe = lambda chance: rng.random() < chance  # noqa: E731
    num_rows = rng.choice([1, 2, 3, 5])
    inputs = prompts([rng.randint(1, 9) for _ in range(num_rows)], seed)
    width = inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": rng.randint(1, 24), "eos_token_id": None}
    if maybe(0.6):
        settings["eos_token_id"] = rng.sample(range(3, VOCAB_SIZE), rng.randint(1, 6))
    if maybe(0.4):
        settings |= {"return_dict_in_generate": True}
        settings |= {"output_scores": maybe(0.5), "output_logits": maybe(0.5)}
    for name, value in {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [9, 18],
        "bad_words_ids": [[26, 27], [12]],
        "renormalize_logits": True,
        "guidance_scale": 1.3,
    }.items():
        if maybe(0.15):
            settings[name] = value
    if settings["eos_token_id"] and maybe(0.3):
        settings["min_new_tokens"] = rng.randint(1, min(8, settings["max_new_tokens"]))
    ends = [rng.randint(1, 20) for _ in range(num_rows)]
    has_criterion, has_processor, has_streamer = maybe(0.35), maybe(0.35), maybe(0.3)
    seeds = [rng.getrandbits(40) for _ in range(num_rows)] if maybe(0.4) else None

    def make(log, noise=()):
        arguments = inputs | settings | {"logits_processor": list(noise)}
        if has_criterion:
            arguments["stopping_criteria"] = [RowEnds(log, ends)]
        if has_streamer:
            arguments["streamer"] = Recorder()
        if has_processor:
            total = torch.zeros(VOCAB_SIZE)

            def processor(ids, scores):
                log.append(("processor", ids.tolist()))
                if ids.shape[1] > width:
                    total.add_(torch.bincount(ids[:, -1], minlength=VOCAB_SIZE))
                return scores - 0.2 * total

            arguments["logits_processor"] = [processor, *noise]
        return arguments

    drafting = {
        "name": rng.choice(list(MODELS)),
        "source": rng.choice(["draft", "tree", "right", "wrong", "prompt_lookup"]),
        "num_nodes": rng.choice([1, 2, 3, 5, 9]),
        "mask": inputs["attention_mask"],
        "seeds": seeds,
    }
    return make, drafting


def source_of(drafting, model, known):
    kind = drafting["source"]
    if kind in ("right", "wrong"):
        return Oracle(known, drafting["mask"], kind == "right")
    if kind == "prompt_lookup":
        return hf_smartspec.PromptLookupCandidates()
    return draft_source(model, width=2 if kind == "tree" else 1)


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_any_combination(models, seed):
    make, drafting = draw(seed)
    model, seeds = models[drafting["name"]], drafting["seeds"]
    noise = [] if seeds is None else [SeededGumbelLogitsProcessor(seeds)]
    plain_log, log = [], []
    plain_arguments, arguments = make(plain_log, noise), make(log)
    expected = model.generate(**plain_arguments)
    sequences = getattr(expected, "sequences", expected)
    spy = Spy(source_of(drafting, model, sequences))
    with hf_smartspec.enabled(model):
        sampling = {} if seeds is None else {"do_sample": True, "top_k": 0, "seed": seeds}
        output = model.generate(**arguments, **sampling, assistant=spy, num_assistant_tokens=drafting["num_nodes"])
    assert torch.equal(getattr(output, "sequences", output), sequences)
    assert log == plain_log
    if "streamer" in arguments:
        assert arguments["streamer"].comparable() == plain_arguments["streamer"].comparable()
    length = sequences.shape[1]
    new = length - drafting["mask"].shape[1]
    if drafting["source"] in ("right", "wrong", "draft", "tree") and new > 1:
        assert spy.drafted > 0
    if drafting["source"] == "right" and new > 2:
        assert spy.accepted > 0
    if drafting["source"] == "wrong":
        assert spy.accepted == 0
    if not isinstance(output, torch.Tensor):
        check_records(output, expected, is_sampled=seeds is not None)
        columns = torch.nn.functional.pad(drafting["mask"], (0, new - 1), value=1).bool()
        check_caches(output[CACHE], expected[CACHE], columns)


def check_records(output, expected, is_sampled):
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if name == "scores" and is_sampled:
            continue  # those of the reference hold the noise
        for step, (line, wanted) in enumerate(zip(ours or (), theirs or (), strict=True)):
            torch.testing.assert_close(line, wanted, atol=1e-4, rtol=1e-4, msg=f"{name} of step {step}")


def check_caches(cache, expected, columns):
    for index, (ours, theirs) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
        assert ours.keys.shape == theirs.keys.shape
        shown = columns[:, -ours.keys.shape[2] :]
        for name in ("keys", "values"):
            pair = (getattr(layer, name).transpose(1, 2)[shown] for layer in (ours, theirs))
            torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4, msg=f"{name} of layer {index}")
