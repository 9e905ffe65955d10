"""A token's numbers depend on its text alone: not on forwards, rows beside it, trees or threads."""

import numpy as np
import pytest
import torch

from hf_smartspec.cpu.few_tokens import ANY, most_tokens
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward, written_decoder

from ...models import GEMMA_4, RECURRENT, new_model
from .deepseek import CONFIGS, LATENT, new_deepseek

DTYPES = [dtype for dtype in (torch.bfloat16, torch.float32) if most_tokens(dtype) == ANY]
pytestmark = pytest.mark.skipif(not DTYPES, reason="long prompts are left to torch on this CPU")
OWN = {
    "gpt2": {"n_inner": 576},
    "gpt_neox": {},
    "cohere": {},
    "cohere2": {},
    "olmo": {},
    "nemotron": {},
    "phimoe": {},
    "apertus": {},
    "hunyuan_v1_dense": {"head_dim": 64},
    "qwen2_moe": {"moe_intermediate_size": 192},
}
OWN["gpt_oss"] = {"head_dim": 64, "intermediate_size": 192, "initializer_range": 1.0, "swiglu_limit": 1.0}
if GEMMA_4:
    OWN["gemma4_text+shared"] = {"head_dim": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 64}
    OWN["gemma4_text+experts"] = OWN["gemma4_text+shared"] | {"moe_intermediate_size": 192}
OWN |= {name: {} for name in ("deepseek_v3", "glm4_moe") if LATENT}
if RECURRENT:
    OWN["qwen3_5_text"] = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 80}
    OWN["qwen3_next"] = OWN["qwen3_5_text"] | {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192}
    OWN["lfm2"] = {}
    sizes = {"mamba_n_heads": 6, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 64}
    OWN |= dict.fromkeys(("bamba", "granitemoehybrid"), sizes)
    OWN["lfm3"] = {"head_dim": 64, "sliding_window": 64}
    OWN["mamba2"] = {"num_heads": 6, "head_dim": 64, "state_size": 64, "n_groups": 2, "residual_in_fp32": False}
TEXT = np.random.default_rng(0).integers(3, 90, 170)


def model_of(name: str, dtype: torch.dtype):
    """A small model whose sums are long enough to depend on their order."""
    window = {"sliding_window": 64} if name in ("mistral", "gemma2", "gpt_oss", "cohere2") or "gemma4" in name else {}
    if name in CONFIGS:
        return new_deepseek(name, dtype, hidden_size=192, moe_intermediate_size=192)
    sizes: dict = {"hidden_size": 192} if name == "mamba2" else {"hidden_size": 192, "intermediate_size": 576}
    sizes |= OWN.get(name, {"head_dim": 64})
    return new_model(name, dtype=dtype, std=0.1, **sizes, **window)


def states_of(forward, pieces, beside=()) -> torch.Tensor:
    """Hidden states of a text that is run in pieces, beside other texts that are run whole with the first of them."""
    row, others, found = forward.add(), [RowInput(forward.add(), text) for text in beside], []
    for piece in pieces:
        with forward.taps.taking({-1}) as fed:
            forward.forward([RowInput(row, piece), *others])
        found += [item.states[-1][item.lines[: item.num_fed]] for item in fed[row].pieces]
        others = []
    return torch.cat(found)


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "gemma2", *OWN])
def forward(request, dtype):
    model = model_of(request.param, dtype)
    found = packed_forward(model, capacity=512)
    states_of(found, [TEXT[:3]])
    assert written_decoder(model).is_reproducible
    return found


@pytest.fixture(scope="module")
def expected(forward):
    return states_of(forward, [TEXT])


@pytest.mark.parametrize("cuts", [[64, 129], [1, 2, 5, 12, 48, 97, 161], [65], range(1, 170)])
def test_pieces(forward, expected, cuts):
    assert torch.equal(states_of(forward, np.split(TEXT, cuts)), expected)


def test_rows_beside_it(forward, expected):
    beside = TEXT[:9], TEXT[5:105], TEXT[1:2]
    assert torch.equal(states_of(forward, np.split(TEXT, [70]), beside), expected)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_threads(forward, expected, number):
    torch.set_num_threads(number)
    assert torch.equal(states_of(forward, np.split(TEXT, [90])), expected)


@pytest.mark.parametrize("start", [20, 110])
def test_branches_of_trees(forward, expected, start):
    """The text is a branch, and each of its nodes has siblings and their children, before and after it."""
    tokens, parents, path, parent = [], [], [], -1
    for token in TEXT[start : start + 12]:
        first = len(tokens)
        tokens += [91, 92, token, 93]
        parents += [parent, first, parent, first + 1]
        parent = first + 2
        path.append(parent)
    tree = DraftTree(np.array(tokens), np.array(parents), np.full(len(tokens), 0.5, np.float32))
    row = forward.add()
    with forward.taps.taking({-1}) as fed:
        forward.forward([RowInput(row, TEXT[:start], tree)])
    (piece,) = fed[row].pieces
    states = piece.states[-1][piece.lines]
    assert torch.equal(states[:start], expected[:start])
    assert torch.equal(states[start:][path], expected[start : start + 12])
