"""Sampling: the tokens of plain decoding with the same noise, for every warper, seed and batch."""

import copy

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

import hf_smartspec
from hf_smartspec import LengthPolicy, SeededGumbelLogitsProcessor, SmartSpecConfig
from hf_smartspec.sampling.noise import add_gumbel_noise, row_seed

from ..covering import exhaustive
from .helpers import EOS, VOCAB_SIZE, Oracle, Spy, check_same, draft_source, noisy_copy, prompts

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
SEED = 11

# name -> (settings, the warpers that `do_sample=True` adds for them)
WARPERS = {
    "none": ({}, []),
    "temperature": ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
    "hot": ({"temperature": 3.0}, [hf.TemperatureLogitsWarper(3.0)]),
    "top_k": ({"top_k": 3}, [hf.TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1}, [hf.MinPLogitsWarper(0.1)]),
    "typical_p": ({"typical_p": 0.7}, [hf.TypicalLogitsWarper(0.7)]),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.05}, [hf.EpsilonLogitsWarper(0.05)]),
    "eta_cutoff": ({"eta_cutoff": 0.05}, [hf.EtaLogitsWarper(0.05)]),
    "top_h": ({"top_h": 0.5}, [hf.TopHLogitsWarper(0.5)]),
    "all": (
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "epsilon_cutoff": 0.01},
        [
            hf.TemperatureLogitsWarper(0.8),
            hf.TopKLogitsWarper(20),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
            hf.TypicalLogitsWarper(0.95),
            hf.EpsilonLogitsWarper(0.01),
        ],
    ),
}


def reference(warpers=(), seed=SEED, processors=(), **kwargs):
    """Plain greedy decoding over warped scores with the same noise."""
    noise = SeededGumbelLogitsProcessor(seed)
    return kwargs | {"do_sample": False, "logits_processor": LogitsProcessorList([*processors, *warpers, noise])}


def check_sampling(model, settings, warpers=(), seed=SEED, source=None, batch=BATCH, processors=lambda: []):
    return check_same(
        model,
        lambda: batch | settings | {"do_sample": True, "logits_processor": processors()},
        reference=lambda: reference(warpers, seed, processors(), **batch, **plain(settings)),
        source=source,
        seed=seed,
    )


def plain(settings):
    """Without the settings of sampling, which plain greedy decoding warns about."""
    names = {name for given, _ in WARPERS.values() for name in given}
    return {name: value for name, value in settings.items() if name not in names}


@pytest.mark.parametrize(("settings", "warpers"), WARPERS.values(), ids=WARPERS)
def test_warpers(model, settings, warpers):
    output, _ = check_sampling(model, settings | {"max_new_tokens": 20}, warpers)
    assert not torch.equal(output[:, :12], model.generate(**BATCH, max_new_tokens=20)[:, :12])


@pytest.mark.parametrize("seed", [0, -3, 2**80, [5, 6, 7, 8], *exhaustive([1], [2**63], [(5, 5, 5, 5)])])
def test_seeds(model, seed):
    check_sampling(model, {"max_new_tokens": 20}, seed=list(seed) if isinstance(seed, tuple) else seed)


def test_numpy_seeds(model):
    hf_smartspec.enable(model)
    kwargs = BATCH | {"do_sample": True, "max_new_tokens": 8, "assistant": "prompt_lookup"}
    expected = model.generate(**kwargs, seed=7)
    assert torch.equal(model.generate(**kwargs, seed=np.int64(7)), expected)
    assert torch.equal(
        model.generate(**kwargs, seed=list(np.array([7, 8, 9, 10]))), model.generate(**kwargs, seed=[7, 8, 9, 10])
    )


def test_seeds_tell_rows_and_calls_apart(model):
    """Equal prompts get noise of their own; an equal seed per row gives equal rows."""
    same = {key: value[1:2].repeat(4, 1) for key, value in BATCH.items()}
    hf_smartspec.enable(model)
    kwargs = same | {"do_sample": True, "max_new_tokens": 20, "assistant": noisy_copy(model)}
    by_int = model.generate(**kwargs, seed=SEED)
    assert len({tuple(row) for row in by_int.tolist()}) == 4
    by_list = model.generate(**kwargs, seed=[SEED] * 4)
    assert len({tuple(row) for row in by_list.tolist()}) == 1
    assert by_list[0].tolist() == by_int[0, : by_list.shape[1]].tolist()  # row 0 keeps the seed itself
    assert not torch.equal(model.generate(**kwargs, seed=SEED + 1)[:, :20], by_int[:, :20])


def test_a_row_does_not_depend_on_its_batch(model):
    hf_smartspec.enable(model)
    kwargs = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None}
    batch = model.generate(**BATCH, **kwargs, seed=[1, 2, 3, 4], assistant=noisy_copy(model))
    for row, length in enumerate(MASK.sum(1).tolist()):
        alone = model.generate(IDS[row : row + 1, -length:], **kwargs, seed=[row + 1], assistant="prompt_lookup")
        assert alone[0].tolist() == batch[row, -length - 16 :].tolist()


@pytest.mark.parametrize("assistant", ["draft", "trees", "right", "wrong", "none"])
def test_drafts_do_not_change_what_is_sampled(model, assistant):
    settings = {"max_new_tokens": 24, "temperature": 1.2}
    known = model.generate(**reference([hf.TemperatureLogitsWarper(1.2)], **BATCH, max_new_tokens=24))
    source = {
        "draft": lambda: draft_source(model),
        "trees": lambda: draft_source(model, num_nodes=9, width=3),
        "right": lambda: Oracle(known, MASK),
        "wrong": lambda: Oracle(known, MASK, is_right=False),
        "none": lambda: None,
    }[assistant]()
    spy = Spy(source) if source else "none"
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, **settings, do_sample=True, seed=SEED, assistant=spy)
    assert torch.equal(output, known)
    if source:
        assert spy.drafted > 0 and (spy.accepted > 0) == (assistant != "wrong")


def test_manual_seed_repeats_a_run(model, draft):
    hf_smartspec.enable(model)
    kwargs = BATCH | {"do_sample": True, "max_new_tokens": 16}

    def run(seed, **assistant):
        torch.manual_seed(seed)
        return [model.generate(**kwargs, **assistant) for _ in range(2)]

    first, second = run(3, assistant=draft)
    assert not torch.equal(first, second)  # the generator moves on
    for assistant in (draft, "prompt_lookup", "none", Oracle(first, MASK)):
        for repeated, once in zip(run(3, assistant=assistant), (first, second)):
            assert torch.equal(repeated, once)
    assert not torch.equal(run(4, assistant=draft)[0], first)


def test_an_explicit_seed_leaves_the_global_generator_alone(model):
    hf_smartspec.enable(model)
    state = torch.get_rng_state()
    model.generate(**BATCH, do_sample=True, max_new_tokens=6, seed=1, assistant="prompt_lookup")
    model.generate(**BATCH, do_sample=False, max_new_tokens=6, assistant="prompt_lookup")
    assert torch.equal(torch.get_rng_state(), state)


def test_num_return_sequences(model):
    settings = {"max_new_tokens": 16, "num_return_sequences": 3, "do_sample": True}
    expanded = {key: value.repeat_interleave(3, 0) for key, value in BATCH.items()}
    output, spy = check_same(
        model,
        BATCH | settings,
        reference=lambda: reference(**expanded, max_new_tokens=16),
        seed=SEED,
    )
    assert output.shape[0] == spy.started == 12
    with hf_smartspec.enabled(model):
        by_list = model.generate(**BATCH, **settings, seed=list(range(12)), assistant=noisy_copy(model))
    assert torch.equal(by_list, model.generate(**reference(seed=list(range(12)), **expanded, max_new_tokens=16)))


def test_processors_before_the_warpers(model):
    settings = {
        "max_new_tokens": 20,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[18]],
        "suppress_tokens": [26],
        "min_new_tokens": 12,
        "renormalize_logits": True,
        "temperature": 0.9,
        "top_p": 0.9,
    }
    warpers = [hf.TemperatureLogitsWarper(0.9), hf.TopPLogitsWarper(0.9)]
    check_sampling(model, settings, warpers)
    config = GenerationConfig(do_sample=True, **settings)
    check_same(
        model,
        BATCH | {"generation_config": config},
        reference=lambda: reference(warpers, **BATCH, **plain(settings)),
        seed=SEED,
    )


def test_stateful_processors_of_the_user(model):
    class Falling(hf.LogitsProcessor):
        def __init__(self):
            self.counts = torch.zeros(VOCAB_SIZE)

        def __call__(self, input_ids, scores):
            self.counts += torch.bincount(input_ids[:, -1], minlength=VOCAB_SIZE)
            return scores - 0.2 * self.counts

    check_sampling(model, {"max_new_tokens": 16}, processors=lambda: [Falling()])
    check_sampling(model, {"max_new_tokens": 16, "guidance_scale": 1.4})


def test_stopping(model, tokenizer):
    model.generation_config.eos_token_id = [EOS, 8, 12, 26]
    output, _ = check_sampling(model, {"max_new_tokens": 40})
    assert output.shape[1] < IDS.shape[1] + 40
    model.generation_config.eos_token_id = None
    stop = tokenizer.decode(output[1, 11:13])[1:]
    settings = {"max_new_tokens": 30, "stop_strings": [stop], "tokenizer": tokenizer}
    check_sampling(model, settings)


def test_scores_are_those_before_the_noise(model):
    """As in plain sampling, whose scores hold no noise either."""
    kwargs = BATCH | {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    kwargs |= {"do_sample": True, "temperature": 0.8, "top_k": 5, "output_logits": True}
    with hf_smartspec.enabled(model):
        ours = model.generate(**kwargs, seed=SEED, assistant=noisy_copy(model))
    assert ours.statistics.accepted_tokens > 0
    warpers = [hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(5)]
    for step, (scores, logits) in enumerate(zip(ours.scores, ours.logits)):
        ids = ours.sequences[:, : IDS.shape[1] + step]
        expected = LogitsProcessorList(warpers)(ids, logits.clone())
        torch.testing.assert_close(scores, expected)
        assert torch.isfinite(scores).sum(1).max() == 5


def test_greedy_ignores_the_seed(model):
    hf_smartspec.enable(model)
    expected = model.generate(**BATCH, max_new_tokens=9)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=9, seed=5, assistant="prompt_lookup"), expected)


def test_the_noise_object_notices_a_new_generation(model):
    """One `SeededGumbelLogitsProcessor` used twice gives the same tokens twice."""
    noise = SeededGumbelLogitsProcessor(SEED)
    runs = [model.generate(**BATCH, max_new_tokens=8, logits_processor=[noise]) for _ in range(2)]
    assert torch.equal(*runs)
    check_same(model, BATCH | {"max_new_tokens": 8, "logits_processor": [noise]})
    for bad in ("7", 1.5, [1, "2"], None):
        with pytest.raises(TypeError, match="`seed` must be an integer or a sequence of integers"):
            SeededGumbelLogitsProcessor(bad)


def test_rejection_where_draft_and_target_are_equal(model):
    """p equals q: every draft is kept; transformers divides by a residual of zero."""
    config = SmartSpecConfig(copy.deepcopy(model), verification="rejection")
    with hf_smartspec.enabled(model):
        output = model.generate(
            **BATCH,
            do_sample=True,
            max_new_tokens=24,
            eos_token_id=None,
            seed=SEED,
            assistant=config,
            return_dict_in_generate=True,
        )
        again = model.generate(
            **BATCH, do_sample=True, max_new_tokens=24, eos_token_id=None, seed=SEED, assistant=config
        )
    assert output.statistics.drafted_tokens > 0
    assert output.statistics.accepted_tokens >= 0.99 * output.statistics.drafted_tokens
    assert torch.equal(output.sequences, again)
    assert int(output.sequences.max()) < VOCAB_SIZE


def test_rejection_of_greedy_rows_is_exact(model, draft):
    check_same(model, BATCH | {"max_new_tokens": 20})
    with hf_smartspec.enabled(model):
        config = SmartSpecConfig(draft, verification="rejection")
        output = model.generate(**BATCH, max_new_tokens=20, assistant=config, return_dict_in_generate=True)
    assert output.statistics.accepted_tokens > 0
    assert torch.equal(output.sequences, model.generate(**BATCH, max_new_tokens=20))


class Reading(LengthPolicy):
    """Notes what it is told of drafts."""

    def __init__(self):
        self.tokens, self.probs = [], set()

    def max_nodes(self, rows, stage, trees):
        return stage.caps

    def select(self, rows, trees):
        for tree in trees:
            self.tokens += tree.tokens.tolist()
            self.probs.update(tree.probs.tolist())
        return list(trees)


def test_what_was_drawn_does_not_decide_what_is_verified_by_rejection(model):
    """Else tokens that a draft seldom draws would come out too seldom: policies do not see how likely they were."""
    settings = BATCH | {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None, "seed": SEED}
    read = {}
    for method in ("coupled", "rejection"):
        read[method] = Reading()
        config = SmartSpecConfig(noisy_copy(model), verification=method, policy=read[method])
        with hf_smartspec.enabled(model):
            model.generate(**settings, assistant=config)
    assert len(set(read["rejection"].tokens)) > 5 and len(read["rejection"].probs) == 1
    assert len(read["coupled"].probs) > 5


@pytest.mark.parametrize("num_nodes", [6, *exhaustive([None])])
def test_typical_acceptance_keeps_more_and_changes_nothing_in_greedy_rows(model, num_nodes):
    """Every token is the target's own, or one that was drafted and is likely enough."""
    draft = noisy_copy(model, scale=0.1)
    settings = BATCH | {"max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}
    sampled = settings | {"do_sample": True, "temperature": 2.0, "top_k": 0, "seed": SEED}
    accepted, texts = {}, {}
    for method in ("coupled", "typical"):
        config = SmartSpecConfig(draft, num_nodes=num_nodes, verification=method)
        with hf_smartspec.enabled(model):
            output = model.generate(**sampled, assistant=config)
            greedy = model.generate(**settings, assistant=config)
        accepted[method], texts[method] = output.statistics.acceptance_rate, output.sequences
        assert torch.equal(greedy.sequences, model.generate(**settings).sequences)
        assert greedy.statistics.accepted_tokens > 0
    assert accepted["typical"] > 1.1 * accepted["coupled"]
    start, mask = IDS.shape[1], torch.cat([MASK, torch.ones(len(IDS), 40, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    others = 0
    for method, text in texts.items():
        with torch.no_grad():
            logits = model(text, attention_mask=mask, position_ids=positions).logits[:, start - 1 : -1] / 2.0
        for row, (line, tokens) in enumerate(zip(logits, text[:, start:])):
            noisy = add_gumbel_noise(line.clone(), [row_seed(SEED, row)] * 40, range(40))
            probs = line.softmax(-1)
            least = (0.3 * (probs * probs.log()).sum(-1).exp()).clamp(max=0.09)
            is_own = noisy.argmax(-1) == tokens
            is_typical = probs.gather(1, tokens[:, None])[:, 0] > least
            assert bool((is_own | is_typical).all()) and (method == "typical" or bool(is_own.all()))
            others += int((~is_own).sum())
    assert others > 0


class Breaks(LogitsProcessor):
    """Gives some tokens a score of which softmax makes no probability, at the sixth step."""

    def __init__(self, value, tokens):
        self.value, self.tokens = value, tokens

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != IDS.shape[1] + 5:
            return scores
        scores = scores.clone()
        scores[:, self.tokens] = self.value
        return scores


@pytest.mark.parametrize("verification", ["coupled", *exhaustive(["rejection"], ["typical"])])
@pytest.mark.parametrize(
    ("value", "tokens"), [(torch.nan, slice(None)), (torch.nan, [5]), (torch.inf, [5]), (-torch.inf, slice(None))]
)
def test_scores_without_probabilities_raise_as_without_speculation(model, value, tokens, verification):
    """And greedy rows go on as they do there."""
    settings = BATCH | {"max_new_tokens": 9, "eos_token_id": None}
    settings["logits_processor"] = LogitsProcessorList([Breaks(value, tokens)])
    assistant = SmartSpecConfig(noisy_copy(model), verification=verification)
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**settings, do_sample=True)
    expected = model.generate(**settings)
    with hf_smartspec.enabled(model):
        with pytest.raises(RuntimeError, match="No token can be sampled"):
            model.generate(**settings, do_sample=True, seed=SEED, assistant=assistant)
        assert torch.equal(model.generate(**settings, assistant=assistant), expected)
