"""
What is known to go wrong in assisted decoding, transformers' own first of all: state that leaks, models in training,
weights that change, candidate sources that misbehave. (Criteria, stop strings and padding: see test_stopping.)
"""

import copy
import logging
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.utils import logging as transformers_logging

import hf_smartspec
from hf_smartspec import DraftTree, FixedLength, SmartSpecConfig, TreeCandidateGenerator

from .helpers import EOS, VOCAB_SIZE, Oracle, Spy, check_same, draft_source, noisy_copy, prompts, tiny_llama

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]


# What transformers refuses


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "num_return_sequences": 3}], ids=["batch", "sequences"])
def test_batches(model, draft, settings):
    """transformers: "assisted generate is only supported for batch_size = 1"."""
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        model.generate(**BATCH, **settings, max_new_tokens=16, seed=1, assistant=spy)
    assert spy.started == (12 if settings else 4) and spy.accepted > 0


def test_a_draft_with_its_own_generation_config(model):
    """transformers' draft inherits the target's settings and its own defaults take effect: here it only drafts."""
    draft = noisy_copy(model)
    draft.generation_config.update(
        repetition_penalty=3.0, num_beams=4, do_sample=True, max_new_tokens=1, stop_strings=["a"], eos_token_id=[3, 4]
    )
    check_same(model, BATCH | {"max_new_tokens": 16}, source=hf_smartspec.DraftModelCandidates(draft))


# State that leaks


def snapshot(model):
    modules = [getattr(module, "config", None) for module in model.modules()]
    return {
        "generation_config": copy.deepcopy(vars(model.generation_config)),
        "as_dict": model.generation_config.to_dict(),
        "config": model.config.to_dict(),
        "attention": [config._attn_implementation for config in modules if config is not None],
        "attributes": set(vars(model)),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
    }


def assert_same_state(before, after):
    for name in before.keys() - {"weights"}:
        assert before[name] == after[name], name
    assert all(torch.equal(tensor, after["weights"][name]) for name, tensor in before["weights"].items())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("raises", [False, True])
def test_target_and_draft_are_left_as_they_were(model, draft, implementation, raises):
    for one in (model, draft):
        one.set_attn_implementation(implementation)
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = snapshot(model), snapshot(draft)

    def processor(ids, scores):
        if raises and ids.shape[1] > IDS.shape[1] + 4:
            raise KeyError("the user's own")
        return scores

    with hf_smartspec.enabled(model):
        for do_sample in (False, True):
            kwargs = {"do_sample": do_sample, "max_new_tokens": 12, "logits_processor": [processor]}
            if raises:
                with pytest.raises(KeyError):
                    model.generate(**BATCH, **kwargs, assistant=draft)
            else:
                model.generate(**BATCH, **kwargs, assistant=draft, num_assistant_tokens=3)
    for one, state in zip((model, draft), before):
        assert_same_state(state, snapshot(one))
    assert torch.equal(model.generate(**BATCH, max_new_tokens=8), tiny_llama().generate(**BATCH, max_new_tokens=8))


@pytest.mark.parametrize("where", ["target", "draft"])
def test_an_error_within_a_forward_leaves_the_attention_as_it_was(model, draft, where):
    failing = model if where == "target" else draft
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no memory")

    handle = failing.model.layers[1].register_forward_pre_hook(fail)
    before = snapshot(model), snapshot(draft)
    with hf_smartspec.enabled(model):
        kwargs = BATCH | {"max_new_tokens": 12, "assistant": draft}
        if where == "target":
            with pytest.raises(MemoryError):
                model.generate(**kwargs)
        else:  # a draft that fails costs its drafts, nothing more
            handle_output = model.generate(**kwargs)
    for one, state in zip((model, draft), before):
        assert_same_state(state, snapshot(one))
    handle.remove()
    expected = model.generate(**BATCH, max_new_tokens=12)
    if where == "draft":
        assert torch.equal(handle_output, expected)
    check_same(model, BATCH | {"max_new_tokens": 12}, source=hf_smartspec.DraftModelCandidates(draft))


def test_the_callers_config_object_is_unchanged(model, draft, tokenizer):
    config = GenerationConfig(
        max_new_tokens=8, num_assistant_tokens=3, stop_strings=["ab"], bad_words_ids=[[5]], eos_token_id=[EOS, 7]
    )
    before, as_dict = copy.deepcopy(vars(config)), config.to_dict()
    with hf_smartspec.enabled(model):
        for assistant in (draft, "prompt_lookup"):
            model.generate(**BATCH, generation_config=config, tokenizer=tokenizer, assistant=assistant)
            with pytest.raises(ValueError):
                model.generate(**BATCH, generation_config=config, assistant=assistant)
    assert vars(config) == before and config.to_dict() == as_dict


# Models in training, weights that change


def test_training_mode_with_dropout_is_served_plainly():
    model = tiny_llama(attention_dropout=0.2).train()
    spy = Spy(draft_source(model))
    hf_smartspec.enable(model)
    torch.manual_seed(5)
    expected = model.generate(**BATCH, max_new_tokens=10)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=10, assistant=spy), expected)
    assert spy.started == 0 and model.training
    model.eval()
    check_same(model, BATCH | {"max_new_tokens": 10})


def test_training_mode_with_dropout_modules_is_served_plainly():
    model = tiny_llama()
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.1), model.lm_head)
    spy = Spy(draft_source(model))
    with hf_smartspec.enabled(model):
        model.train().generate(**BATCH, max_new_tokens=5, assistant=spy)
    assert spy.started == 0


def test_training_mode_without_dropout_is_served(model):
    """As TRL calls `generate`: under `no_grad`, with `model.training`, between two steps of the optimiser."""
    model.train()
    with torch.no_grad():
        check_same(model, BATCH | {"generation_config": GenerationConfig(max_new_tokens=16)})
    assert model.training


@pytest.mark.filterwarnings("ignore::FutureWarning")  # later versions of transformers rename the method
def test_gradient_checkpointing_is_served_plainly(model, hush):
    model.gradient_checkpointing_enable()
    model.train()
    spy = Spy(draft_source(model))
    expected = model.generate(**BATCH, max_new_tokens=8)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**BATCH, max_new_tokens=8, assistant=spy), expected)
    model.eval()
    check_same(model, BATCH | {"max_new_tokens": 8})


def test_a_draft_in_training_mode(model):
    """Its dropout may spoil the drafts, never the output."""
    draft = noisy_copy(tiny_llama(attention_dropout=0.5)).train()
    expected = model.generate(**BATCH, max_new_tokens=16)
    spy = Spy(hf_smartspec.DraftModelCandidates(draft))
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**BATCH, max_new_tokens=16, assistant=spy), expected)
    assert spy.drafted > 0 and draft.training


@pytest.mark.parametrize("changes", ["target", "draft", "both"])
def test_weights_that_change_between_two_calls(model, changes):
    """Reinforcement learning does that: neither keys and values nor drafts of the old weights may survive."""
    draft = noisy_copy(model)
    source = hf_smartspec.DraftModelCandidates(draft)
    spy = Spy(source)
    hf_smartspec.enable(model)
    model.generate(**BATCH, max_new_tokens=16, assistant=spy)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameters in zip(model.parameters(), draft.parameters()):
            step = 0.3 * torch.randn(parameters[0].shape, generator=generator)
            for parameter, name in zip(parameters, ("target", "draft")):
                if changes in (name, "both"):
                    parameter += step
    spy.accepted = 0
    expected = model.generate(**BATCH, max_new_tokens=16)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=16, assistant=spy), expected)
    assert (spy.accepted > 0) or changes != "both"


def test_weights_on_which_a_gradient_is_taken(model):
    """A training step between two calls works: nothing of inference mode has stuck to the parameters."""
    hf_smartspec.enable(model)
    draft = noisy_copy(model)
    for _ in range(2):
        output = model.generate(**BATCH, max_new_tokens=6, assistant=draft)
        model.zero_grad()
        loss = model(output, labels=output).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        assert torch.equal(output[:, : IDS.shape[1]], IDS)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(model, context):
    with context():
        check_same(model, BATCH | {"max_new_tokens": 12})
        check_same(
            model,
            BATCH | {"max_new_tokens": 12, "do_sample": True},
            seed=3,
            reference=lambda: (
                BATCH | {"max_new_tokens": 12, "logits_processor": [hf_smartspec.SeededGumbelLogitsProcessor(3)]}
            ),
        )
    expected = model.generate(**BATCH, max_new_tokens=6)
    with hf_smartspec.enabled(model):  # the parameters are usable outside afterwards
        assert torch.equal(model.generate(**BATCH, max_new_tokens=6, assistant="prompt_lookup"), expected)


# Sources that misbehave


class Faulty(TreeCandidateGenerator):
    """An oracle that goes wrong for one row, in a way of choice."""

    default_num_nodes = 4

    def __init__(self, known, fault, step=1):
        self.oracle, self.fault, self.step = Oracle(known, MASK), fault, step
        self.victim = None
        self.num_proposals = 0

    def start(self, request_id, prompt):
        if self.victim is None:
            self.victim = request_id
        self._fail("start", request_id)
        self.oracle.start(request_id, prompt)

    def couple(self, request_id, processors, seed):
        if self.fault == "couple":
            raise RuntimeError("couple")

    def propose(self, request_ids, max_nodes):
        self.num_proposals += 1
        trees = self.oracle.propose(request_ids, max_nodes)
        if self.num_proposals <= self.step:
            return trees
        self._fail("propose", *request_ids)
        if self.fault == "all":
            raise RuntimeError("all")
        if self.fault == "number":
            return trees[:-1]
        if self.fault == "nothing":
            return None
        return [self._spoilt(tree) if name == self.victim else tree for name, tree in zip(request_ids, trees)]

    def _spoilt(self, tree):
        chain = np.arange(3)
        ones = np.ones(3, np.float32)
        return {
            "cycle": lambda: DraftTree(chain, np.array([2, 0, 1]), ones),
            "self": lambda: DraftTree(chain, np.array([-1, 1, 1]), ones),
            "parent": lambda: DraftTree(chain, np.array([-2, 0, 1]), ones),
            "too_high": lambda: DraftTree.chain([3, VOCAB_SIZE]),
            "negative": lambda: DraftTree.chain([3, -1]),
            "lengths": lambda: DraftTree(chain, np.array([-1, 0]), ones),
            "floats": lambda: DraftTree(np.array([3.0, 4.5, 1.0]), np.array([-1, 0, 1]), ones),
            "none": lambda: None,
            "list": lambda: [3, 4, 5],
            "lists": lambda: DraftTree([3, 4], [-1, 0], [1.0, 1.0]),
        }.get(self.fault, lambda: tree)()

    def observe(self, request_id, tokens):
        self._fail("observe", request_id)
        self.oracle.observe(request_id, tokens)

    def stop(self, request_id):
        self._fail("stop", request_id)
        self.oracle.stop(request_id)

    def _fail(self, fault, *request_ids):
        if self.fault == fault and self.victim in request_ids:
            raise RuntimeError(fault)


@pytest.fixture
def warnings(caplog):
    """The library's log records of at least warning level."""
    caplog.set_level(logging.WARNING, logger="hf_smartspec")

    def collected():
        return [record for record in caplog.records if record.name.startswith("hf_smartspec")]

    return collected


class Scribbler(Spy):
    """Writes into the tokens that it is shown."""

    def observe(self, request_id, tokens):
        super().observe(request_id, tokens.copy())
        tokens[:] = 3


def test_a_source_that_overwrites_what_it_is_shown(model):
    """Processors read the text too."""
    check_same(model, BATCH | {"max_new_tokens": 12, "repetition_penalty": 1.5}, source=Scribbler(draft_source(model)))


SPOILT_TREES = ["cycle", "self", "parent", "too_high", "negative", "lengths", "floats", "none", "list", "lists"]


@pytest.mark.parametrize("fault", ["start", "propose", "observe", "stop", *SPOILT_TREES])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_source_that_fails_for_one_row_costs_that_row_its_drafts(model, warnings, fault, do_sample):
    model.generation_config.eos_token_id = None
    kwargs = BATCH | {"max_new_tokens": 20, "do_sample": do_sample}
    hf_smartspec.enable(model)
    known = model.generate(**kwargs, seed=2, assistant="none")
    source = Faulty(known, fault)
    output = model.generate(**kwargs, seed=2, assistant=source, return_dict_in_generate=True)
    assert torch.equal(output.sequences, known)
    (record,) = warnings()
    assert "Faulty" in record.getMessage() and "without speculation" in record.getMessage()
    statistics = output.statistics
    assert statistics.accepted_tokens == statistics.drafted_tokens
    # 3 rows need 4 steps of 5 tokens; the other one goes on alone, unless it failed when all was done
    assert statistics.accepted_tokens >= 3 * 16
    assert statistics.forwards == {"stop": 4, "start": 20}.get(fault, 16)


@pytest.mark.parametrize("fault", ["all", "number", "nothing", "couple"])
def test_a_source_that_fails_for_all_rows(model, warnings, fault):
    known = model.generate(**BATCH, max_new_tokens=20)
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=20, assistant=Faulty(known, fault))
    assert torch.equal(output, known)
    assert len(warnings()) == 1


def test_a_failure_in_one_call_does_not_touch_the_next(model, warnings):
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=20)
    hf_smartspec.enable(model)
    source = Faulty(known, "propose")
    model.generate(**BATCH, max_new_tokens=20, assistant=source)
    source.fault = None
    spy = Spy(source)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=20, assistant=spy), known)
    assert spy.accepted > 20
    assert len(warnings()) == 1


class Huge(Oracle):
    """Pays no attention to how many nodes it may propose."""

    def propose(self, request_ids, max_nodes):
        return super().propose(request_ids, [25] * len(request_ids))


def test_too_many_nodes_are_cut(model, warnings):
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=20)
    with hf_smartspec.enabled(model):
        output = model.generate(**BATCH, max_new_tokens=20, assistant=Huge(known, MASK), return_dict_in_generate=True)
    assert torch.equal(output.sequences, known)
    assert output.statistics.forwards == 4 and not warnings()
    assert output.statistics.accepted_tokens == output.statistics.drafted_tokens == 4 * 16


class Wild(Oracle):
    """Random trees with random, even senseless, probabilities."""

    default_num_nodes = 6

    def __init__(self, seed, known):
        super().__init__(known, MASK)
        self.rng = np.random.default_rng(seed)

    def propose(self, request_ids, max_nodes):
        return [self._grown_from(chain) for chain in super().propose(request_ids, max_nodes)]

    def _grown_from(self, chain):
        size = int(self.rng.integers(1, 12))
        parents = np.array([self.rng.integers(-1, node) if node else -1 for node in range(size)])
        tokens = self.rng.integers(0, VOCAB_SIZE, size)
        for node, depth in enumerate(DraftTree(tokens, parents, np.ones(size)).depths):
            if depth <= len(chain) and self.rng.random() < 0.5:
                tokens[node] = chain.tokens[depth - 1]
        probs = self.rng.choice([0.0, 0.5, 1.0, 3.0, -1.0, np.nan, np.inf], size)
        return DraftTree(tokens, parents, probs.astype(np.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(4))
def test_wild_trees(model, seed):
    known = model.generate(**BATCH, max_new_tokens=24)
    source = Wild(seed, known)
    for num_nodes in (None, 3):
        spy = Spy(source)
        with hf_smartspec.enabled(model):
            output = model.generate(**BATCH, max_new_tokens=24, assistant=spy, num_assistant_tokens=num_nodes)
        assert torch.equal(output, known)
        assert spy.accepted > 0


def test_policies_that_misbehave_are_reported(model):
    """A length policy is no guest: what it does wrong is an error."""

    class Short(FixedLength):
        def select(self, rows, trees):
            return list(trees)[:-1]

    with hf_smartspec.enabled(model), pytest.raises(ValueError, match="Short selected 3 trees for 4 rows"):
        model.generate(**BATCH, max_new_tokens=8, assistant=SmartSpecConfig("prompt_lookup", policy=Short(3)))


# What is not served is said


@contextmanager
def logging_not_configured():
    """As in a program that has not set logging up. No fixture: pytest adds its handlers after those have run."""
    transformers_logging.warning_once.cache_clear()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_plain_serving_is_announced_once(model, capsys):
    """A draft that is loaded and does nothing, without a hint, costs somebody a day."""
    kwargs = BATCH | {"max_new_tokens": 3, "output_hidden_states": True, "return_dict_in_generate": True}
    with hf_smartspec.enabled(model), logging_not_configured():
        for _ in range(2):
            model.generate(**kwargs, assistant="prompt_lookup")
    text = capsys.readouterr().err
    assert text.count("Decoding without speculation: attentions and hidden states are returned step by step") == 1


def test_a_failing_source_is_announced_once_per_call(model, capsys):
    known = model.generate(**BATCH, max_new_tokens=12)
    with hf_smartspec.enabled(model), logging_not_configured():
        for _ in range(2):
            model.generate(**BATCH, max_new_tokens=12, assistant=Faulty(known, "all"))
    text = capsys.readouterr().err
    assert text.count("Faulty failed and was dropped") == 2 and "RuntimeError('all')" in text


def test_nothing_is_said_where_all_is_well(model, capsys):
    with logging_not_configured():
        check_same(model, BATCH | {"max_new_tokens": 12})
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


# transformers' own candidate generators


def test_candidate_generators_of_transformers(model):
    """They know one sequence; each row gets a copy."""
    generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=10**6)
    repeating = {"input_ids": IDS[:, -2:].repeat(1, 6)}
    model.generation_config.eos_token_id = None
    expected = model.generate(**repeating, max_new_tokens=40)
    with hf_smartspec.enabled(model):
        output = model.generate(**repeating, max_new_tokens=40, assistant=generator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.drafted_tokens > 0


def test_our_sources_in_transformers_assisted_decoding(model, hush, monkeypatch):
    """The other way round: a tree source is a `CandidateGenerator` too, and drafts its best chain."""
    source = Spy(draft_source(model, num_nodes=6, width=2))
    inputs = prompts([7])
    expected = model.generate(**inputs, max_new_tokens=20)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda *args, **kwargs: source)
    output = model.generate(**inputs, max_new_tokens=20, assistant_model=noisy_copy(model))
    assert torch.equal(output, expected)
    assert source.accepted > 0


def test_processors_lists_are_not_shared_between_calls(model):
    processors = LogitsProcessorList()
    with hf_smartspec.enabled(model):
        for _ in range(2):
            model.generate(
                **BATCH, max_new_tokens=4, repetition_penalty=1.5, logits_processor=processors, assistant="none"
            )
    assert len(processors) == 0
