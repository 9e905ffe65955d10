"""Drafters that are right by design: every slot of every block is accepted, whatever the text has gone through."""

import pytest

import hf_smartspec
from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter
from hf_smartspec.candidates.heads.blocks.source import BlockCandidates

from ....cases import left_padded
from ....serving.helpers import TIMEOUT
from .perfect import ROUND, cycle, cyclic_target, written

GREEDY = {"max_new_tokens": 41, "do_sample": False}
# Copying needs a whole round, and one more token, before the text's newest.
PROMPTS = [cycle(ROUND + 2, 1), cycle(3 * ROUND, 5), cycle(2 * ROUND + 1, 0)]


@pytest.fixture(scope="module")
def target():
    return cyclic_target()


LAYOUTS = {
    "fill-in": {"block_size": 6},
    "from the anchor": {"block_size": 5, "from_anchor": True},
    "causal": {"block_size": 6, "causal": (True,)},
    "causal, window": {"block_size": 5, "from_anchor": True, "causal": (True,), "windows": (ROUND + 2,)},
    "window both ways": {"block_size": 4, "windows": (ROUND + 2,)},
    "own vocabulary": {"kind": "own vocabulary"},
    "jetspec": {"kind": "jetspec", "causal": (True,)},
    "jetspec with an adapter": {"kind": "adapter", "causal": (True,)},
    "gemma": {"kind": "gemma", "from_anchor": True},
    "laguna": {"kind": "laguna"},
    "dflash2": {"kind": "dflash2"},
    "dspark, vanilla": {"kind": "vanilla", "from_anchor": True},
    "dspark, gated, fill-in": {"kind": "gated"},
    "dspark, rnn": {"kind": "rnn", "from_anchor": True},
    "domino": {"kind": "domino", "from_anchor": True},
    "domino, fill-in": {"kind": "domino"},
    "xpress": {"kind": "xpress"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_every_slot_is_accepted(target, tmp_path, layout, is_chunked):
    folder = written(target, tmp_path, **LAYOUTS[layout])
    heads = BlockDrafter.from_pretrained(folder, target)
    chunks = {"prefill_chunk_size": 5} if is_chunked else {}
    for texts in (PROMPTS, PROMPTS[:1]):
        with hf_smartspec.enabled(target):
            output = target.generate(
                **left_padded(texts),
                **GREEDY,
                **chunks,
                assistant=SmartSpecConfig(BlockCandidates(heads, width=1), num_nodes=heads.num_depths),
                return_dict_in_generate=True,
            )
        for text, row in zip(texts, output.sequences.tolist()):
            start = (text[0] - 3) % ROUND
            assert row[-len(text) - 41 :] == cycle(len(text) + 41, start)
        counts = output.statistics
        assert counts.accepted_tokens == counts.drafted_tokens > 0
        if not is_chunked:  # the first token, and then a block and one more in every step
            assert counts.forwards == 1 + -(-40 // (heads.num_depths + 1))


def test_requests_that_come_and_go(target, tmp_path):
    """They begin with others' texts, in pieces, beside others that are cancelled or draft nothing for a while."""
    source = BlockCandidates(BlockDrafter.from_pretrained(written(target, tmp_path), target), width=1)
    config = SmartSpecConfig(source, num_nodes=5)
    options = {"max_new_tokens": 24, "do_sample": False}
    with Engine(target, config, max_batch_size=4, max_prefill_tokens=7) as engine:
        for begin in range(3):
            texts = [cycle(ROUND + 2 + 5 * number + 12 * begin, number) for number in range(4)]
            with engine.pause():
                dropped = engine.add_request(texts[0], max_new_tokens=400, do_sample=False)
                names = [engine.add_request(text, **options) for text in texts]
                names.append(engine.add_request(texts[1], assistant="none", **options))
            outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
            engine.cancel_request(dropped)
            engine.get_result(dropped, timeout=TIMEOUT)
            for text, output in zip([*texts, texts[1]], outputs):
                whole = [*text, *output.generated_tokens]
                assert output.error is None and whole == cycle(len(whole), (text[0] - 3) % ROUND)
                counts = output.statistics
                assert counts.accepted_tokens == counts.drafted_tokens
            assert all(output.statistics.drafted_tokens >= 18 for output in outputs[:-1])
    assert not source._states
