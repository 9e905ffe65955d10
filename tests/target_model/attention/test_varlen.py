"""
Attention without masks, with flash attention written out as its documentation has it, and compiled code as this library
has it: both take a GPU otherwise.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig
from hf_smartspec.candidates.models.draft_model import DraftModelCandidates
from hf_smartspec.gpu import elementwise
from hf_smartspec.target_model.attention import tree_attention as attention
from hf_smartspec.target_model.attention import varlen
from hf_smartspec.target_model.forward import packed, ragged
from hf_smartspec.target_model.graphs.padding import rounded, rounded_columns
from hf_smartspec.target_model.layout.spans import Spans
from tests.generate.helpers import prompts
from tests.models import new_model, noisy_model

from ...covering import exhaustive
from ...serving.helpers import TIMEOUT

BATCH = prompts([5, 9, 2, 40])
OPTIONS = BATCH | {"max_new_tokens": 24, "do_sample": False}


def flash_attention(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout, is_causal, debug, *, scale, window_size_left,
    window_size_right, seqused_k,
):  # fmt: skip
    assert not dropout and not debug and window_size_right == (None if window_size_left is None else 0)
    return _flash_attention(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, seqused_k
    )


@torch.library.custom_op("smartspec_tests::flash_attention", mutates_args=())
def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor,
    max_q: int, max_k: int, is_causal: bool, scale: float | None, window_size_left: int | None, seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Row by row, in float32; nothing to look at gives zeros and a log-sum-exp of inf, as the kernels have it."""
    most_queries, most_keys = int(cum_seq_q.diff().max()), int(seqused_k.max())
    assert max_q in (most_queries, rounded(most_queries)) and max_k in (most_keys, rounded_columns(most_keys))
    if max_q == 1 and query.shape[1] > key.shape[1] and window_size_left is None:
        query.view(len(seqused_k), *query.shape[1:])  # as the kernels do
    assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == torch.int32
    groups = query.shape[1] // key.shape[1]
    outputs, lses = [], []
    for row, used in enumerate(seqused_k.tolist()):
        start = int(cum_seq_k[row])
        assert start + used <= min(end for end in cum_seq_k.tolist() if end > start)  # where padding begins, too
        own = query[cum_seq_q[row] : cum_seq_q[row + 1]].transpose(0, 1).float()
        keys, values = (
            memory[start : start + used].repeat_interleave(groups, 1).transpose(0, 1).float() for memory in (key, value)
        )
        scores = own @ keys.transpose(1, 2) * (scale or query.shape[-1] ** -0.5)
        distance = torch.arange(own.shape[1])[:, None] + used - own.shape[1] - torch.arange(used)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal:
            hidden |= distance < 0
        if window_size_left is not None:
            hidden |= distance > window_size_left
        lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
        weights = (scores.masked_fill(hidden, -torch.inf) - lse[..., None]).exp().nan_to_num()
        outputs.append((weights @ values).transpose(0, 1).to(query.dtype))
        lses.append(lse.masked_fill(lse.isneginf(), torch.inf))
    return torch.cat(outputs), torch.cat(lses, dim=1)


def few_query_attention(query, key, value, rows, most_queries, most_keys, trees=None, window=None, scaling=None):
    return _few_query_attention(query, key, value, rows, most_queries, most_keys, trees, window, scaling)


@torch.library.custom_op("smartspec_tests::few_query_attention", mutates_args=())
def _few_query_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, most_queries: int, most_keys: int,
    trees: torch.Tensor | None, window: int | None, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Row by row, in float32."""
    starts, firsts, used = rows.tolist()
    assert max(np.diff(starts)) <= most_queries and max(used[:-1]) <= most_keys
    groups, output = query.shape[1] // key.shape[1], torch.empty_like(query)
    for start, end, first, num_keys in zip(starts, starts[1:], firsts, used):
        queries = query[start:end].transpose(0, 1).float()
        keys, values = (
            memory[first : first + num_keys].repeat_interleave(groups, 1).transpose(0, 1).float()
            for memory in (key, value)
        )
        columns, positions = torch.arange(num_keys), torch.arange(num_keys - (end - start), num_keys)[:, None]
        is_seen = columns <= positions
        if trees is not None:
            nodes, positions, *words = trees[:, start:end, None]
            offsets = columns - nodes
            is_seen = (columns <= positions) & (offsets < 0)
            for number, word in enumerate(words):
                places = offsets - 64 * number
                is_seen |= (places >= 0) & (places < 64) & ((word >> places.clamp(0, 63)) & 1 == 1)
        if window is not None:
            is_seen = is_seen & (columns > positions - window)
        scores = queries @ keys.transpose(1, 2) * (scaling or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        output[start:end] = (weights @ values).transpose(0, 1).to(query.dtype)
    return output


@pytest.fixture
def calls(monkeypatch):
    """Compiled code and flash attention for everyone; how often they and masks were asked."""
    counts = {"compiled": 0, "flash": 0, "masks": 0}

    def counted(name, function):
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    for module in (ragged, varlen):
        monkeypatch.setattr(module, "serves", lambda *args: True)
    monkeypatch.setattr(varlen, "_is_right", {})
    monkeypatch.setattr(varlen, "_TOLERANCE", 1e-5)  # in float32
    monkeypatch.setattr(varlen, "has_triton", lambda device: True)
    monkeypatch.setattr(varlen, "MOST_QUERIES", 8)
    monkeypatch.setattr(varlen, "few_query_attention", counted("compiled", few_query_attention))
    monkeypatch.setattr(varlen, "_flash_attention_forward", counted("flash", flash_attention))
    monkeypatch.setattr(attention, "_masked_attention", counted("masks", attention._masked_attention))
    return counts


def sources(architecture):
    draft = noisy_model(architecture)
    return {
        "none": "none",
        "lookup": SmartSpecConfig("prompt_lookup", num_nodes=4),
        "suffix": SmartSpecConfig("suffix", num_nodes=8),
        "chain": SmartSpecConfig(draft, num_nodes=4),
        "tree": SmartSpecConfig(DraftModelCandidates(draft, width=3), num_nodes=9),
    }


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("source", ["none", "lookup", "suffix", "chain", "tree"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gemma2", *exhaustive(["mistral"], ["gpt2"])])
def test_tokens_are_those_of_plain_decoding(calls, architecture, source, written):
    model = new_model(architecture)
    assistant = sources(architecture)[source]
    expected = model.generate(**OPTIONS)
    with hf_smartspec.target_model.written.registry.written_decoders(written), hf_smartspec.enabled(model):
        output = model.generate(**OPTIONS, assistant=assistant, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert source in ("none", "lookup") or output.statistics.accepted_tokens > 0
    if architecture == "gemma2":
        assert not calls["flash"] + calls["compiled"], "they do not know soft caps"
        return
    assert varlen._is_right and all(varlen._is_right.values())
    assert calls["flash"], "of prompts"
    if architecture in ("llama", "gpt2"):
        assert calls["masks"] <= 6 < calls["compiled"], "but for the first of each kind, of target and draft"


@pytest.mark.parametrize("source", ["none", "suffix", "tree"])
def test_rows_in_slots_of_different_sizes(calls, source):
    """They are one call all the same."""
    model, generator = new_model("llama"), torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (300, 5, 9, 150)]
    settings = {"max_new_tokens": 16, "eos_token_id": None}
    with hf_smartspec.Engine(model, sources("llama")[source], max_batch_size=4) as engine:
        with engine.pause():
            names = [engine.add_request(text, **settings) for text in texts]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        slabs = engine._memory.cache.slabs.items
        assert len({slab.capacity for slab in slabs}) == len(slabs) == 3
    for text, output in zip(texts, outputs):
        expected = model.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **settings)
        assert output.generated_tokens == expected[0, len(text) :].tolist()
    assert source == "none" or engine.statistics.accepted_tokens > 0
    assert varlen._is_right and all(varlen._is_right.values()) and calls["compiled"] > 1


def test_context_is_not_padded(monkeypatch):
    contexts = []
    for is_served in (True, False):
        monkeypatch.setattr(ragged, "serves", lambda *_, is_served=is_served: is_served)
        forward = packed.PackedForward(new_model("llama"))
        rows = [forward.add() for _ in range(3)]
        for row, length in zip(rows, (5, 40, 12)):
            row.length = length
        contexts.append(forward.padded_context(rows))
    assert contexts[0] == 5 + 40 + 12 < contexts[1]


@pytest.mark.parametrize(("chunk", "way"), [(7, "compiled"), (11, "flash")])
def test_prompts_in_pieces(calls, chunk, way):
    model = new_model("llama")
    forward = packed.PackedForward(model, prefill_chunk=chunk)
    ids = OPTIONS["input_ids"][-1]
    with torch.no_grad():
        logits, _ = forward.forward([packed.RowInput(forward.add(), ids.numpy())])
        expected = model(ids[None]).logits[0, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert calls[way] > 4


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_what_does_not_do_as_masks_do_is_not_used(calls, monkeypatch, caplog, fault):
    def faulty(*args, **kwargs):
        if fault == "raises":
            raise RuntimeError("no kernel")
        return few_query_attention(*args, **kwargs) * 1.1

    monkeypatch.setattr(varlen, "few_query_attention", faulty)
    monkeypatch.setattr(varlen, "_flash_attention_forward", lambda *args, **kwargs: [faulty(*args, **kwargs)])
    model = new_model("llama")
    expected = model.generate(**OPTIONS)
    with hf_smartspec.enabled(model):
        assert model.generate(**OPTIONS, assistant="none").tolist() == expected.tolist()
    assert varlen._is_right and not any(varlen._is_right.values())


def test_only_half_precision_on_gpus_is_served():
    cuda = torch.device("cuda")
    assert varlen.serves(cuda, torch.bfloat16, 128)
    assert not varlen.serves(cuda, torch.float32, 128)
    assert not varlen.serves(cuda, torch.float16, 512)
    assert not varlen.serves(torch.device("cpu"), torch.bfloat16, 128)


def test_calls_that_compiled_code_cannot_read_get_masks(calls):
    rows = torch.tensor([[0, 2], [0, 5], [2, 0]])
    layout = SimpleNamespace(spans=Spans(rows, None, most_queries=2, most_keys=2, has_few_queries=True))
    query, key = torch.zeros(2, 4, 24), torch.zeros(5, 4, 24)
    assert varlen.kind_of(query, key, torch.zeros_like(key), layout, None) is not None
    assert varlen.kind_of(query, key, key[..., :16].contiguous(), layout, None) is None, "values of fewer dimensions"
    assert not varlen.all_are_right(query.device), "recordings keep what masks are made from"
    assert varlen.kind_of(query.mT.contiguous().mT, key, key, layout, None) is None
    query.requires_grad_()
    assert varlen.kind_of(query, key, key, layout, None) is None
    with torch.no_grad():
        assert varlen.kind_of(query, key, key, layout, None) is not None


def test_trees_of_several_words_are_compared_by_themselves(calls):
    rows, key, kinds = torch.tensor([[0, 2], [0, 5], [2, 0]]), torch.zeros(5, 4, 24), []
    for num_words in range(4):
        trees = torch.zeros(2 + num_words, 2, dtype=torch.long) if num_words else None
        layout = SimpleNamespace(spans=Spans(rows, trees, most_queries=2, most_keys=2, has_few_queries=True))
        kinds.append(varlen.kind_of(key[:2], key, key, layout, None))
    assert len(set(kinds[:3])) == 3 and kinds[2] == kinds[3]


def test_other_threads_may_find_kinds_meanwhile(monkeypatch):
    class Device:
        __hash__ = object.__hash__

        def __eq__(self, other):
            varlen._is_right[self, len(varlen._is_right)] = False
            return False

    monkeypatch.setattr(varlen, "_is_right", {(Device(),): True})
    assert varlen.all_are_right(torch.device("cpu"))


def test_norms_whose_weights_learn_are_not_compiled(monkeypatch):
    monkeypatch.setattr(elementwise, "serves", lambda x: True)
    x, weight = torch.zeros(2, 8), torch.ones(8, requires_grad=True)
    assert not elementwise.can_norm(x, weight)
    with torch.no_grad():
        assert elementwise.can_norm(x, weight)
