"""Candidate sources and length policies that misbehave: they cost a request its drafts, never its tokens."""

import json
import logging

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import (
    Committed,
    DraftTree,
    FixedLength,
    LengthPolicy,
    SmartSpecConfig,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
)
from hf_smartspec.commands.common.models import find_demo, load_model, load_tokenizer

from .helpers import VOCAB_SIZE, Oracle, Spy, check_same, draft_source, prompts

BATCH = prompts([5, 9, 2, 7])
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]


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

    def begin(self, request):
        if self.fault == "begin":
            raise RuntimeError("begin")
        super().begin(request)

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
    caplog.set_level(logging.WARNING)

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


@pytest.mark.parametrize("fault", ["all", "number", "nothing", "begin"])
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
    """A length policy is not guarded: what it does wrong is an error."""

    class Short(FixedLength):
        def select(self, rows, trees):
            return list(trees)[:-1]

    with hf_smartspec.enabled(model), pytest.raises(ValueError, match="Short selected 3 trees for 4 rows"):
        model.generate(**BATCH, max_new_tokens=8, assistant=SmartSpecConfig("prompt_lookup", policy=Short(3)))


class Odd(LengthPolicy):
    """Gives limits that are none, and loses a tree where it is told to."""

    def __init__(self, loses=False):
        self.loses, self.asked = loses, []

    def max_nodes(self, rows, stage, trees):
        return [-3, 2.0, 10**6, 0][: len(rows)]

    def calibrated(self, rows, stage, trees):
        self.asked.append(stage.asked.tolist())
        return list(trees)[self.loses :]


def test_limits_that_are_none(model):
    """They are kept within what a row may be given, and what a policy loses is an error at once."""
    model.generation_config.eos_token_id = None
    known = model.generate(**BATCH, max_new_tokens=20)
    policy = Odd()
    with hf_smartspec.enabled(model):
        config = SmartSpecConfig(Oracle(known, MASK), policy=policy)
        output = model.generate(**BATCH, max_new_tokens=20, assistant=config, return_dict_in_generate=True)
        with pytest.raises(ValueError, match="Odd calibrated 3 trees for 4 rows"):
            model.generate(**BATCH, max_new_tokens=8, assistant=SmartSpecConfig(Oracle(known, MASK), policy=Odd(True)))
    assert torch.equal(output.sequences, known) and output.statistics.accepted_tokens > 0
    assert policy.asked[0] == [0, 2, 4, 0]


# --- What the target thought likely ----------------------------------------------------------------------------------


class Shown(SuffixTreeCandidates):
    """Keeps what it is shown, and may fail then."""

    def __init__(self, fails=False):
        super().__init__(max_bytes=2**20)
        self.fails, self.shown = fails, []

    def observe(self, request_id, tokens):
        if (likeliest := Committed.of(tokens).likeliest) is not None:
            self.shown.append(likeliest)
            if self.fails:
                raise RuntimeError("shown")
        super().observe(request_id, tokens)


def decoded(model, assistant, **options):
    """What `generate` returns, the tokens of plain decoding among it."""
    options = BATCH | {"max_new_tokens": 20, "return_dict_in_generate": True} | options
    with hf_smartspec.enabled(model):
        plain = model.generate(**options, assistant="none")
        output = model.generate(**options, assistant=assistant)
    assert output.sequences.tolist() == plain.sequences.tolist()
    return output


@pytest.mark.parametrize("others", [[], ["prompt_lookup"]])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}])
def test_sources_are_shown_what_was_likely_behind_what_was_verified(model, others, sampling):
    source = Shown()
    decoded(model, [source, *others] if others else source, **sampling)
    for item in source.shown:
        assert len(item.before) == len(item.tokens) == len(item.following) == len(item.shares)
        assert (np.diff(item.shares, axis=1) <= 0).all() and np.allclose(item.shares.sum(axis=1), 1)
    first = source.shown[0]
    assert [first.before[0], first.tokens[0]] == IDS[0, -2:].tolist()
    with torch.no_grad():
        logits = model(IDS[:1], attention_mask=MASK[:1]).logits[0, -1]
    assert first.following[0].tolist() == logits.topk(first.following.shape[1]).indices.tolist()


def test_no_more_than_so_many_lines_of_a_step_are_shown(model, monkeypatch):
    monkeypatch.setattr("hf_smartspec.decoding.verify._TOP_LINES", 2)
    source = Shown()
    decoded(model, source)
    assert [len(item.tokens) for item in source.shown[:2]] == [1, 1], "of the first step"
    assert all(len(item.tokens) in (1, 2) for item in source.shown), "rows without a line are left out"


def test_a_source_that_fails_when_shown_what_was_likely_is_dropped(model, caplog):
    with caplog.at_level(logging.WARNING):
        output = decoded(model, Shown(fails=True))
    assert "Shown failed and was dropped" in caplog.text
    assert output.statistics.drafted_tokens == 0


def test_one_of_several_that_fails_when_shown_what_was_likely_leaves_the_others(model, caplog):
    with caplog.at_level(logging.WARNING):
        output = decoded(model, [Shown(fails=True), SuffixTreeCandidates(max_bytes=2**20)], max_new_tokens=60)
    assert "Shown failed and is left out" in caplog.text
    assert output.statistics.accepted_tokens > 0


def test_new_text_of_a_trained_model_is_drafted_by_what_was_likely():
    folder = find_demo()
    assert folder is not None, "it lies in the repository"
    path = str(folder / "models" / "target")
    model, tokenizer = load_model(path), load_tokenizer(path)
    lines = (folder / "prompts.jsonl").read_text().splitlines()[::6]
    inputs = tokenizer([json.loads(line)["prompt"] for line in lines], return_tensors="pt", padding=True)
    accepted = []
    for likeliest in (False, True):
        config = SmartSpecConfig(SuffixTreeCandidates(max_bytes=2**20, likeliest=likeliest), num_nodes=12)
        output = decoded(model, config, **inputs, max_new_tokens=40)
        accepted.append(output.statistics.accepted_tokens)
    assert accepted[1] > 1.2 * accepted[0]
