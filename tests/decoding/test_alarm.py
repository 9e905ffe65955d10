"""Learned drafters whose drafts are hardly ever accepted are reported, once; others never are."""

import threading

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import (
    DraftModelCandidates,
    DraftTree,
    Engine,
    MedusaCandidates,
    OnlineDistillation,
    SmartSpecConfig,
)
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.decoding.alarm import AcceptanceAlarm, is_near_zero

from ..candidates.heads.by_heart import texts_of, trained_eagle
from ..candidates.heads.fitted import fitted_heads
from ..covering import exhaustive
from ..generate.helpers import prompts, tiny_llama

SAID = "hardly ever drafts what comes"
VOCAB = 1000  # of which a random draft hits one by chance
LENGTHS = (9, 5, 12, 7)
GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
SAMPLED = GREEDY | {"do_sample": True, "seed": 3, "temperature": 1.0}


def new_target():
    model = tiny_llama(vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=4)
    model.generation_config.eos_token_id = None
    return hf_smartspec.enable(model)


@pytest.fixture
def target():
    """Nothing is known of what drafted for it before."""
    return new_target()


def random_draft(seed=1):
    return tiny_llama(seed, vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=1)


def alarms(caplog):
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


@pytest.mark.parametrize(("num_drafts", "num_hits"), [(59, 0), (93, 1), (124, 2)])
def test_near_zero_is_what_one_right_draft_in_twenty_hardly_gives(num_drafts, num_hits):
    assert is_near_zero(num_drafts, num_hits) and not is_near_zero(num_drafts - 1, num_hits)
    assert not is_near_zero(num_drafts, num_hits + 1)


def test_first_tokens_count_by_source_and_each_is_reported_once(caplog):
    alarm = AcceptanceAlarm()
    tree, empty = DraftTree(np.array([5, 6, 7]), np.array([-1, -1, 0]), np.ones(3, np.float32)), DraftTree.empty()
    wrong, right = np.array([7, 8]), np.array([6])
    for _ in range(20):
        alarm.observe("bad", [tree, tree, tree, empty, tree], [wrong, wrong, wrong, wrong, wrong[:0]])
        alarm.observe("good", [tree, tree], [right, wrong])
        alarm.observe("both", [tree, tree], [wrong, wrong])
    (said,) = alarms(caplog)
    assert said.startswith(f"bad {SAID}: 0 of its first 60 drafts began with the right token.")
    assert not alarm.watches("bad") and not alarm.watches("good") and alarm.watches("both")
    for _ in range(200):
        alarm.observe("bad", [tree], [wrong])
        alarm.observe("good", [tree], [wrong])
    assert len(alarms(caplog)) == 1, "what was decided stays"


def test_loops_of_several_threads_report_a_source_once(caplog):
    alarm, tree = AcceptanceAlarm(), DraftTree.chain([5])

    def work():
        for _ in range(300):
            alarm.observe("bad", [tree], [np.array([6])])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(alarms(caplog)) == 1


@pytest.mark.parametrize(
    ("way", "num_nodes"), [(GREEDY, 3), *exhaustive((SAMPLED, 3), (GREEDY, None), (SAMPLED, None))]
)
def test_a_random_draft_model_is_reported_once_over_several_calls(target, caplog, way, num_nodes):
    assistant = SmartSpecConfig(random_draft(), num_nodes=num_nodes)
    inputs = prompts(LENGTHS * 4)
    plain = target.generate(**inputs, **way, assistant="none")
    num_left = 40  # calls at most: goodput hardly asks such a draft any more
    while num_left:
        assert torch.equal(target.generate(**inputs, **way, assistant=assistant), plain)
        num_left = min(num_left - 1, 2) if alarms(caplog) else num_left - 1  # two more say nothing new
    (said,) = alarms(caplog)
    assert "another tokenizer" in said and "untrained" in said and "other layers" in said
    other = SmartSpecConfig(random_draft(2), num_nodes=3)
    target.generate(**inputs, **way, assistant=other)
    assert len(alarms(caplog)) == 2, "another source"
    again = new_target()
    again.generate(**inputs, **way, assistant=other)
    assert len(alarms(caplog)) == 3, "another model"


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_draft_model_that_fits_is_not_reported(target, caplog, way, verification):
    assistant = SmartSpecConfig(new_target(), num_nodes=3, verification=verification)
    for seed in range(4):
        target.generate(**prompts(LENGTHS, seed), **way, assistant=assistant)
    assert target.smartspec_statistics.total.acceptance_rate > 0.9 or verification == "rejection"
    assert not alarms(caplog)


def test_engines_report_it_too(target, caplog):
    rows = [row[mask.bool()].tolist() for row, mask in zip(*prompts(LENGTHS * 3).values())]
    with Engine(target, SmartSpecConfig(random_draft(), num_nodes=3), max_batch_size=4) as engine:
        for row in rows:
            engine.add_request(row, max_new_tokens=40, do_sample=False)
        assert len([engine.get_result() for _ in rows]) == len(rows)
    assert len(alarms(caplog)) == 1
    caplog.clear()
    with Engine(target, SmartSpecConfig(new_target(), num_nodes=3), max_batch_size=4) as engine:
        for row in rows:
            engine.add_request(row, max_new_tokens=40, do_sample=False)
        assert len([engine.get_result() for _ in rows]) == len(rows)
    assert not alarms(caplog)


def test_heads_that_read_other_layers_are_reported(target, tmp_path, caplog):
    trained_eagle(target, texts_of(target, prompts(LENGTHS), 40)).save_pretrained(tmp_path)
    inputs = prompts(LENGTHS)
    right = EagleHeads.from_pretrained(tmp_path, target)
    for _ in range(3):
        target.generate(**inputs, **GREEDY, assistant=SmartSpecConfig(right, num_nodes=3))
    assert target.smartspec_statistics.last.acceptance_rate > 0.2 and not alarms(caplog)
    wrong = EagleHeads.from_pretrained(tmp_path, target, hidden_layers=(0, 0, 0))
    for _ in range(3):
        target.generate(**inputs, **GREEDY, assistant=SmartSpecConfig(wrong, num_nodes=3))
    (said,) = alarms(caplog)
    assert tmp_path.name in said


def medusa(target):
    """Heads that know some texts of the target by heart."""
    width = max(LENGTHS)
    ids = prompts([width] * 4)["input_ids"]
    texts = target.generate(ids, **GREEDY, assistant="none")
    return MedusaCandidates(fitted_heads(target, texts), num_nodes=3), ids


def test_good_heads_at_a_high_temperature_are_not_reported(target, caplog):
    source, ids = medusa(target)
    target.generate(ids, **GREEDY, assistant=source)
    assert target.smartspec_statistics.last.acceptance_rate > 0.2
    again = new_target()
    for _ in range(4):
        again.generate(ids, **SAMPLED | {"temperature": 20.0}, assistant=SmartSpecConfig(source, num_nodes=3))
    total = again.smartspec_statistics.total
    assert total.drafted_tokens > 300 and total.acceptance_rate < 0.02 and not alarms(caplog)


@pytest.mark.parametrize(
    "assistant", [["suffix", "prompt_lookup"], *exhaustive(["prompt_lookup"], ["suffix"])], ids=str
)
def test_sources_of_text_are_never_reported(target, caplog, assistant):
    """Texts that repeat themselves, and a target that does not go on so."""
    ids = torch.tensor([[5, 6, 7, 8] * 6] * 8)
    for _ in range(4):
        target.generate(ids, **SAMPLED, assistant=SmartSpecConfig(assistant, num_nodes=4))
    assert target.smartspec_statistics.total.drafted_tokens > 100
    assert not alarms(caplog)


def test_drafters_that_learn_may_be_poor_at_first(target, caplog):
    online = OnlineDistillation(background=False)
    assistant = SmartSpecConfig(random_draft(), num_nodes=3, online=online)
    for _ in range(3):
        target.generate(**prompts(LENGTHS), **GREEDY, assistant=assistant)
    assert target.smartspec_statistics.total.drafted_tokens > 300 and not alarms(caplog)


def test_tokens_that_a_processor_forces_say_nothing(target, caplog):
    def force(ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, ids.shape[1] % VOCAB] = 0.0
        return forced

    source = DraftModelCandidates(new_target(), num_nodes=3)
    for _ in range(3):
        target.generate(**prompts(LENGTHS), **GREEDY, assistant=source, logits_processor=[force])
    assert target.smartspec_statistics.total.acceptance_rate < 0.02 and not alarms(caplog)
