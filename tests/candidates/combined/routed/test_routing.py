"""Who drafts for a request: its tag, a function, a pipeline, a classifier or what drafters have yielded so far."""

import logging

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BloomConfig, BloomForCausalLM, pipeline

import hf_smartspec
from hf_smartspec import (
    Engine,
    PromptLookupCandidates,
    RoutedCandidates,
    SmartSpecConfig,
    SuffixTreeCandidates,
    TextClassifier,
)
from hf_smartspec.candidates import FusedCandidates, StagedCandidates
from hf_smartspec.candidates.forwarding import unwrapped
from hf_smartspec.candidates.request import SourceRequest

from ....covering import exhaustive
from ....generate.helpers import PAD, VOCAB_SIZE, noisy_copy, prompts, set_special_tokens, tiny_llama, tiny_tokenizer
from ....serving.helpers import TIMEOUT, Holds
from ...heads.fitted import fitted_eagle, fitted_heads

LENGTHS, NEW = [5, 12, 6, 14, 9], 24


@pytest.fixture(scope="module")
def model():
    return hf_smartspec.enable(tiny_llama(eos_token_id=None))


@pytest.fixture(scope="module")
def drafters(model):
    texts = model.generate(**prompts([12] * 12), max_new_tokens=NEW)
    return {
        "model": noisy_copy(model),
        "eagle": fitted_eagle(model, texts),
        "medusa": fitted_heads(model, texts),
        "list": ["prompt_lookup", noisy_copy(model, seed=5)],
        "lookup": "prompt_lookup",
    }


def check(model, routed, expected, tag=None, assistant=None, **options):
    """One mixed batch: the tokens of plain `generate`, and by how many requests each drafter was used."""
    inputs = prompts(LENGTHS)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    config = SmartSpecConfig(assistant or routed, tag=tag, **options)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, assistant=config), plain)
    served = {name: found.requests for name, found in routed.statistics().items() if found.requests}
    assert served == expected
    return routed.statistics()


TAGS = ["model", "eagle", "medusa", "list", "lookup"]


@pytest.mark.parametrize("beside", [[], ["suffix"]])
@pytest.mark.parametrize("num_nodes", [4, pytest.param(None, marks=pytest.mark.adaptive)])
def test_rows_of_a_batch_go_to_the_drafters_that_their_tags_name(model, drafters, beside, num_nodes, caplog):
    routed = RoutedCandidates(drafters)
    found = check(
        model, routed, dict.fromkeys(TAGS, 1), TAGS, [*beside, routed] if beside else None, num_nodes=num_nodes
    )
    # What comes with the prompt does not count.
    assert all(0 < item.steps <= item.tokens < NEW and item.goodput > 0 for item in found.values())
    if num_nodes and not beside:
        assert found["model"].mean_accepted_length > 1.5 and found["eagle"].seconds_draft > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


def test_one_tag_is_for_all_rows_and_labels_name_further_ones(model, drafters):
    check(model, RoutedCandidates(drafters), {"model": 5}, "model")
    routed = RoutedCandidates(drafters, labels={"de": "model", "nl": "model", "en": "lookup"})
    check(model, routed, {"model": 2, "lookup": 2, "eagle": 1}, ["de", "en", "nl", "eagle", "en"])


def test_tags_are_given_per_prompt_of_several_returned_sequences(model, drafters):
    routed, inputs = RoutedCandidates(drafters), prompts([5, 7])
    kwargs = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2, "seed": 1}
    fast = model.generate(**inputs, **kwargs, assistant=SmartSpecConfig(routed, tag=["model", "lookup"]))
    assert torch.equal(fast, model.generate(**inputs, **kwargs, assistant="none"))
    assert (routed.statistics()["model"].requests, routed.statistics()["lookup"].requests) == (2, 2)


def test_a_function_gets_token_ids_or_text(model, drafters):
    seen = []

    def by_length(prompt):
        seen.append(prompt)
        return "model" if len(prompt) > 8 else "lookup"

    check(model, RoutedCandidates(drafters, by_length), {"model": 3, "lookup": 2})
    ids = prompts(LENGTHS)["input_ids"]
    assert [prompt.tolist() for prompt in seen] == [[t for t in row.tolist() if t != PAD] for row in ids]
    seen.clear()
    tokenizer = tiny_tokenizer()
    routed = RoutedCandidates(drafters, by_length, tokenizer=tokenizer)
    check(model, routed, {"model": 3, "lookup": 2} if all(len(t) > 8 for t in seen) else _by_text(tokenizer, ids))
    assert seen == tokenizer.batch_decode(ids, skip_special_tokens=True)


def _by_text(tokenizer, ids):
    long = sum(len(text) > 8 for text in tokenizer.batch_decode(ids, skip_special_tokens=True))
    return {"model": long, "lookup": len(ids) - long}


def test_targets_that_run_row_by_row_are_served_too():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    target = hf_smartspec.enable(set_special_tokens(BloomForCausalLM(config).eval(), None))
    routed = RoutedCandidates({"model": noisy_copy(target), "lookup": "prompt_lookup"})
    tags = ["model", "lookup", None, "model", "lookup"]
    inputs = prompts(LENGTHS)
    plain = target.generate(**inputs, max_new_tokens=NEW, assistant="none")
    fast = target.generate(**inputs, max_new_tokens=NEW, assistant=SmartSpecConfig(routed, tag=tags))
    assert torch.equal(fast, plain) and routed.statistics()["model"].mean_accepted_length > 2


def test_rejection_sampling_takes_drafters_that_sample(model):
    drafts = {"a": noisy_copy(model), "b": noisy_copy(model, seed=4)}
    routed = RoutedCandidates(drafts)
    config = SmartSpecConfig(routed, verification="rejection", tag=["a", "b", "a", "b", "a"])
    model.generate(**prompts(LENGTHS), max_new_tokens=NEW, do_sample=True, seed=3, assistant=config)
    assert all(found.mean_accepted_length > 1.3 for found in routed.statistics().values())


def test_a_tag_goes_before_the_router(model, drafters):
    routed = RoutedCandidates(drafters, lambda prompt: "lookup")
    check(model, routed, {"eagle": 1, "lookup": 4}, [None, "eagle", None, None, None])


def test_a_pipeline_of_transformers_classifies(model, drafters):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 64
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=64, id2label={0: "x", 1: "y"}, initializer_range=1.0, **sizes
    )
    classify = pipeline("text-classification", model=BertForSequenceClassification(config).eval(), tokenizer=tokenizer)
    texts = tokenizer.batch_decode(prompts(LENGTHS)["input_ids"], skip_special_tokens=True)
    labels = [result["label"] for result in classify(texts, truncation=True)]
    routed = RoutedCandidates(drafters, classify, {"x": "model", "y": "lookup"}, tokenizer)
    counts = {"model": labels.count("x"), "lookup": labels.count("y")}
    check(model, routed, {name: number for name, number in counts.items() if number})
    assert routed._kinds(["ab" * 500], [None])[0] in ("x", "y"), "long ones are cut"
    with pytest.raises(ValueError, match="tokenizer"):
        RoutedCandidates(drafters, classify)
    with pytest.raises(ValueError, match="text-classification"):
        RoutedCandidates(drafters, pipeline("text-generation", model=model, tokenizer=tokenizer), tokenizer=tokenizer)


def test_a_classifier_learns_from_the_tags_of_some_requests(model, drafters):
    """Of one kind are prompts of low tokens, of the other those of high ones."""
    routed = RoutedCandidates({name: drafters[name] for name in ("model", "lookup")}, TextClassifier())
    rng = np.random.default_rng(0)
    low, high = rng.integers(3, 20, (2, 24, 10))
    high = high + 20
    batch = {"input_ids": torch.from_numpy(np.concatenate([low[:8], high[:8]]))}
    config = SmartSpecConfig(routed, tag=["model"] * 8 + ["lookup"] * 8)
    model.generate(**batch, max_new_tokens=2, assistant=config)
    before = routed.statistics()
    for ids, name in ((low[8:], "model"), (high[8:], "lookup")):
        model.generate(torch.from_numpy(ids), max_new_tokens=2, assistant=routed)
        assert routed.statistics()[name].requests - before[name].requests >= 15


@pytest.mark.parametrize(
    "router", [lambda prompt: 1 / 0, lambda prompt: "?", *exhaustive([lambda prompt: 7], [lambda prompt: None])]
)
def test_where_nothing_is_known_some_drafter_serves(model, drafters, router):
    routed = RoutedCandidates(drafters, router)
    inputs = prompts(LENGTHS)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, assistant=routed), plain)
    assert sum(found.requests for found in routed.statistics().values()) == len(LENGTHS)
    assert routed.bandit.kinds == (["?"] if router(None) == "?" else [""]) if _answers(router) else [""]


def _answers(router):
    try:
        return isinstance(router(None), str)
    except ZeroDivisionError:
        return False


def test_unknown_tags_are_kinds_of_their_own(model, drafters):
    routed = RoutedCandidates(drafters)
    model.generate(**prompts(LENGTHS), max_new_tokens=NEW, assistant=SmartSpecConfig(routed, tag="Klingon"))
    assert routed.bandit.kinds == ["Klingon"]
    assert set(routed.bandit.goodput("Klingon")) == set(drafters)


def test_a_drafter_that_fails_costs_its_requests_only_itself(model, drafters, caplog):
    class Broken(PromptLookupCandidates):
        def propose(self, request_ids, max_nodes):
            raise RuntimeError("broken")

    routed = RoutedCandidates({"model": drafters["model"], "broken": Broken()})
    tags = ["model", "broken", "model", "broken", "model"]
    found = check(model, routed, {"model": 3, "broken": 2}, tags, num_nodes=4)
    assert found["model"].mean_accepted_length > 1.5 and found["broken"].mean_accepted_length <= 1.0
    assert "Broken failed" in caplog.text


def test_drafters_of_one_kind_are_told_apart_and_are_still_themselves(model):
    """What is learnt of a source is kept under its name."""
    trees = {"tenant a": SuffixTreeCandidates(), "tenant b": SuffixTreeCandidates()}
    routed = RoutedCandidates(trees | {"list": StagedCandidates([PromptLookupCandidates(), SuffixTreeCandidates()])})
    requests = [SourceRequest(tag, np.arange(3, 9), tag=tag) for tag in (*trees, "list")]
    chosen = routed.choose(requests)
    stages = [stage for source in chosen for stage in source.stages]
    assert len({stage.name for stage in stages}) == len(stages) == 4
    assert [unwrapped(stage) for stage in stages[:2]] == list(trees.values())
    assert [unwrapped(stage) for stage in stages[2:]] == routed.drafters["list"].sources


# By itself, where nobody asks who drafts


@pytest.mark.parametrize(
    "wrap", [lambda x: FusedCandidates([x]), lambda x: StagedCandidates([x, PromptLookupCandidates()])]
)
def test_as_a_part_of_other_sources(model, drafters, wrap):
    routed = RoutedCandidates({"model": drafters["model"], "lookup": "prompt_lookup"})
    inputs = prompts(LENGTHS)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    model.generate(**inputs, max_new_tokens=1, assistant=routed)  # loads its drafters
    config = SmartSpecConfig(wrap(routed), num_nodes=4)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, assistant=config), plain)
    assert sum(found.requests for found in routed.statistics().values()) == 2 * len(LENGTHS)
    assert not routed._serving and not len(routed._log)


def test_in_transformers_own_loop(model):
    routed = RoutedCandidates({"lookup": PromptLookupCandidates()})
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    drafted, logits = routed.get_candidates(ids)
    assert drafted.tolist()[0][:11] == [3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4] and logits is None


# Refusals


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda m: RoutedCandidates({}), ValueError, "at least one"),
        (lambda m: RoutedCandidates(["suffix"]), TypeError, "mapping"),
        (lambda m: RoutedCandidates({1: "suffix"}), TypeError, "Names"),
        (lambda m: RoutedCandidates({"a": RoutedCandidates({"b": "suffix"})}), ValueError, "RoutedCandidates itself"),
        (lambda m: RoutedCandidates({"a": "suffix"}, router="suffix"), TypeError, "router"),
        (lambda m: RoutedCandidates({"a": "suffix"}, labels={"x": "b"}), ValueError, r"`labels` names \['b'\]"),
        (lambda m: RoutedCandidates({"a": "suffix"}, tokenizer="gpt2"), TypeError, "tokenizer"),
        (lambda m: RoutedCandidates({"a": "suffix"}, half_life=0), ValueError, "half_life"),
        (lambda m: SmartSpecConfig(RoutedCandidates({"a": "suffix"}), tag=["a", ""]), TypeError, "tag"),
        (lambda m: SmartSpecConfig(RoutedCandidates({"a": "suffix"}), tag=3), TypeError, "tag"),
        (lambda m: hf_smartspec.enable(m, assistant=RoutedCandidates({"a": "sufix"})), ValueError, "sufix"),
    ],
)
def test_bad_input_is_refused_at_once(model, make, error, match):
    with pytest.raises(error, match=match):
        make(model)


@pytest.mark.parametrize(
    ("assistant", "match"),
    [
        (lambda: SmartSpecConfig("suffix", tag="a"), "RoutedCandidates"),
        (lambda: SmartSpecConfig(RoutedCandidates({"a": "suffix"}), tag=["a"]), "one per prompt: got 1 for 2"),
        (lambda: ["suffix", RoutedCandidates({"a": "suffix"})], "stands in the list as well"),
        (lambda: RoutedCandidates({"a": tiny_llama(vocab_size=90)}), "vocabular"),
        (lambda: SmartSpecConfig(RoutedCandidates({"a": "suffix"}), verification="rejection"), "draft"),
    ],
)
def test_bad_calls_are_refused_before_work_starts(model, assistant, match):
    with pytest.raises(ValueError, match=match):
        model.generate(**prompts([5, 6]), max_new_tokens=4, assistant=assistant())


def test_it_drafts_for_one_target_at_a_time(model, drafters):
    routed, other = RoutedCandidates({"model": drafters["model"]}), hf_smartspec.enable(tiny_llama(seed=3))
    for target in (model, other, model):
        target.generate(**prompts([5]), max_new_tokens=4, assistant=routed)
    with Engine(model, routed) as engine, Holds() as holds:
        engine.add_request([3, 4], max_new_tokens=400, stopping_criteria=[holds])
        assert holds.arrived.wait(TIMEOUT) and len(routed._log)
        with pytest.raises(ValueError, match="at present"):
            other.generate(**prompts([5]), max_new_tokens=4, assistant=routed)
        engine.cancel_request("req_0")
        holds.may_go.set()
