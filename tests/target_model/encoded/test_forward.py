"""Ragged rows and trees behind an encoder: the logits of the model's own forward."""

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.compat import TESTED_ENCODED_TYPES
from hf_smartspec.target_model.encoded import EncodedForward, masks_encoder
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.support import capabilities as support
from hf_smartspec.target_model.support.capabilities import packing_obstacle

from ...models import ENCODER_DECODER, SPEECH, VOCAB_SIZE, new_model, shared_model
from .helpers import encoder_inputs


class Text:
    """A row of a forward, what it holds, and the encoder outputs that it sees."""

    def __init__(self, row, states, mask, tokens):
        self.row, self.states, self.mask, self.tokens = row, states, mask, tokens


def random_tree(rng: np.random.Generator, size: int) -> DraftTree:
    parents = [int(rng.integers(-1, node)) for node in range(size)]
    return DraftTree(rng.integers(3, VOCAB_SIZE, size), np.array(parents, np.int64), np.ones(size, np.float32))


class Bench:
    """A forward whose every line is compared with that of the plain model behind the same tokens."""

    def __init__(self, architecture: str, seed: int, **options):
        self.architecture, self.model = architecture, shared_model(architecture)
        self.rng = np.random.default_rng(seed)
        self.forward = EncodedForward(self.model, **options)
        self.texts: list[Text] = []

    @torch.no_grad()
    def encode(self, lengths: list[int], prompt_len: int) -> None:
        inputs = encoder_inputs(self.architecture, self.rng, lengths)
        outputs = self.model.get_encoder()(**inputs, return_dict=True)
        mask = inputs.get("attention_mask") if masks_encoder(self.model) else None
        for number, row in enumerate(self.forward.encode(outputs, mask)):
            own = None if mask is None else mask[number : number + 1]
            tokens = self.rng.integers(3, VOCAB_SIZE, prompt_len).tolist()
            self.texts.append(Text(row, outputs[0][number : number + 1], own, tokens))

    @torch.no_grad()
    def step(self, texts: list[Text], size: int) -> None:
        """Every text gets a tree, of which a random path is kept, and one more token."""
        self.forward.compact([text.row for text in texts])
        trees = [random_tree(self.rng, int(self.rng.integers(0, size + 1))) for _ in texts]
        feeds = [np.array(text.tokens[text.row.length :], np.int64) for text in texts]
        logits, offsets = self.forward.forward([RowInput(t.row, *item) for t, *item in zip(texts, feeds, trees)])
        paths = []
        for text, tree, offset in zip(texts, trees, offsets):
            self.check(text, [], logits[offset])
            path: list[int] = []
            for node in range(len(tree)):
                ancestors = [node]
                while tree.parents[ancestors[0]] >= 0:
                    ancestors.insert(0, int(tree.parents[ancestors[0]]))
                self.check(text, tree.tokens[ancestors].tolist(), logits[offset + 1 + node])
                path = ancestors if self.rng.random() < 0.5 else path
            paths.append(path)
            text.tokens += [*tree.tokens[path].tolist(), int(self.rng.integers(3, VOCAB_SIZE))]
        self.forward.commit([text.row for text in texts], paths)

    def check(self, text: Text, further: list[int], line: torch.Tensor) -> None:
        ids = torch.tensor([text.tokens + further])
        mask = {} if text.mask is None else {"attention_mask": text.mask}
        outputs = BaseModelOutput(text.states)
        output = self.model(encoder_outputs=outputs, decoder_input_ids=ids, use_cache=False, **mask)
        expected = output.logits[0, -1]
        assert torch.allclose(line, expected, atol=1e-4 * float(expected.std()), rtol=1e-4)


@pytest.mark.parametrize("architecture", [*ENCODER_DECODER, *SPEECH])
@pytest.mark.parametrize("seed", range(2))
def test_ragged_rows_and_trees(architecture, seed):
    bench = Bench(architecture, seed)
    bench.encode([3, 17, 1, 9], prompt_len=1)
    for _ in range(3):
        bench.step(bench.texts, size=6)
    bench.step(bench.texts[2:], size=3)


@pytest.mark.parametrize("architecture", ["t5", "bart", "whisper"])
def test_rows_come_and_go(architecture):
    """Rows of several calls, some of which end: those that stay move to where others were."""
    bench = Bench(architecture, seed=5)
    bench.encode([4, 12, 4], prompt_len=3)
    bench.step(bench.texts, size=4)
    bench.encode([30, 2], prompt_len=2)
    for number in (0, 1, 2):
        bench.step(bench.texts, size=4)
        bench.forward.remove(bench.texts.pop(number % len(bench.texts)).row)
    bench.step([bench.texts[1]], size=4)
    bench.step(bench.texts, size=4)


def test_rows_for_which_there_is_no_room_leave_none_behind(monkeypatch):
    bench, added = Bench("t5", seed=2), []
    own = bench.forward.cache.add

    def add(num_tokens):
        if len(added) == 2:
            raise MemoryError
        added.append(own(num_tokens))
        return added[-1]

    monkeypatch.setattr(bench.forward.cache, "add", add)
    with pytest.raises(MemoryError):
        bench.encode([3, 4, 5], prompt_len=1)
    assert bench.forward.cache.num_taken == bench.forward.cross.num_taken == 0


@pytest.mark.parametrize("architecture", ["t5", "bart", "whisper"])
def test_prompts_of_the_decoder_run_in_pieces(architecture):
    bench = Bench(architecture, seed=1, prefill_chunk=16)
    bench.encode([3, 8], prompt_len=50)
    bench.step(bench.texts, size=5)
    bench.step(bench.texts, size=5)


@pytest.mark.parametrize("architecture", ["t5", "umt5"])
def test_far_positions_share_biases(architecture):
    """Behind `relative_attention_max_distance` tokens, and on both sides of every border before it."""
    bench = Bench(architecture, seed=2)
    bench.encode([2, 5], prompt_len=bench.model.config.relative_attention_max_distance + 8)
    bench.step(bench.texts, size=12)


def test_columns_of_encoder_outputs_count_as_read():
    bench = Bench("t5", seed=0)
    bench.encode([3, 5], prompt_len=1)
    bench.texts[0].row.length = bench.texts[1].row.length = 7
    assert bench.forward.padded_context([text.row for text in bench.texts]) == 7 + 7 + sum(
        1 if text.mask is None else int(text.mask.sum()) for text in bench.texts
    )


# --- Who is packed ----------------------------------------------------------------------------------------------------


def test_listed_types_are_those_under_test():
    tested = {shared_model(name).config.model_type for name in (*ENCODER_DECODER, *SPEECH)}
    assert tested >= TESTED_ENCODED_TYPES


@pytest.mark.parametrize("architecture", ENCODER_DECODER)
def test_the_probe_finds_what_can_be_packed(architecture, monkeypatch):
    monkeypatch.setattr(support, "TESTED_ENCODED_TYPES", frozenset())
    obstacle = packing_obstacle(new_model(architecture))
    if architecture == "t5gemma":
        assert obstacle is not None and "after `sliding_window=5` tokens has not been tried out" in obstacle
    else:
        assert obstacle is None


def test_the_probe_finds_positions_that_depend_on_other_tokens(monkeypatch):
    """M2M-100 counts positions without padding tokens, by what is run together."""
    monkeypatch.setattr(support, "TESTED_ENCODED_TYPES", frozenset())
    model = new_model("m2m_100")
    assert packing_obstacle(model) == "the attention of M2M100ForConditionalGeneration cannot be packed"
    assert support.rowwise_obstacle(model) is None
