"""The layers of block drafters, from published files: hidden states, tapped layers, slots, masks, what is refused."""

import json

import pytest
import torch

import hf_smartspec
from hf_smartspec.candidates.heads.blocks.config import default_layers
from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter
from hf_smartspec.candidates.heads.kinds import load

from ....generate.helpers import tiny_llama
from ....models import new_model, shared_model
from .forwards import run_block
from .published import LAYOUTS, Published, random_drafter, z_lab
from .shapes import convolution_shapes, markov_shapes, selector_shapes, shapes, waves


@pytest.fixture(scope="module")
def target():
    return shared_model("llama")


def sizes(target) -> tuple[int, int]:
    return target.config.hidden_size, target.config.vocab_size


DFLASH2 = {"convolution": (3, 4), "selector_rank": 3, "head_dim": 4}
DSPARK = {"from_anchor": True, "confidence": "markov"}
# Of every layout some drafters.
KINDS = {
    "z-lab": ("z-lab", {}),
    "z-lab, wide heads, one layer": ("z-lab", {"head_dim": 16, "layers": 1, "outputs": (1,)}),
    "z-lab, bias": ("z-lab", {"has_bias": True}),
    "z-lab, windows": ("z-lab", {"windows": (4, None), "causal": (True, False)}),
    "z-lab, windows both ways": ("z-lab", {"windows": (4, 4), "causal": False}),
    "z-lab, causal": ("z-lab", {"causal": True}),
    "z-lab, from the anchor": ("z-lab", {"from_anchor": True, "outputs": (-1, 1)}),
    "z-lab, own vocabulary": ("z-lab", {"own_vocab": 60}),
    "prefixed": ("prefixed", {"has_embedding": True}),
    "muse": ("muse", {"windows": (4, 4)}),
    "speculators": ("speculators dflash", {"own_vocab": 60}),
    "speculators, windows": ("speculators dflash", {"windows": (None, 4), "causal": (False, True)}),
    "speculators, windows both ways": ("speculators dflash", {"windows": (None, 4)}),
    "DeepSpec's DFlash": ("deepspec", {"from_anchor": True}),
    "DFlash2": ("z-lab", DFLASH2 | {"windows": (4, 4)}),
    "DFlash2, speculators": ("speculators dflash2", DFLASH2),
    "vanilla": ("deepspec", DSPARK | {"markov": "vanilla", "has_embedding": True}),
    "gated": ("z-lab", DSPARK | {"markov": "gated"}),
    "rnn, fill-in": ("speculators dspark", DSPARK | {"markov": "rnn", "own_vocab": 60, "from_anchor": False}),
    "Gemma 4, keys as values": ("deepspec", {"gemma": True, "from_anchor": True}),
    "Gemma 4": ("z-lab", {"gemma": False}),
    "Laguna, gate of heads": ("prefixed", {"gate": 4}),
    "Laguna, gate of numbers": ("z-lab", {"gate": 32}),
    "MiMo": ("z-lab", {"has_sinks": True, "turned": 4, "windows": (4, 4), "causal": False}),
    "sinks, one layer": ("prefixed", {"has_sinks": True, "layers": 1, "outputs": (1,)}),
    "JetSpec with an adapter": ("z-lab", {"has_adapter": True, "causal": True}),
    "Domino": ("z-lab", {"is_domino": True}),
    "xPress": ("speculators xpress", {"is_xpress": True, "own_vocab": 60}),
}
LABELS = dict.fromkeys(["DFlash2", "DFlash2, speculators"], "dflash2") | {"Domino": "domino", "xPress": "xpress"}
LABELS |= dict.fromkeys(["vanilla", "gated", "rnn, fill-in"], "dspark")


def write(kind: str, target, folder) -> Published:
    layout, options = KINDS[kind]
    drafter = random_drafter(*sizes(target), **options)
    LAYOUTS[layout](drafter, sizes(target)[1], folder)
    return drafter


def inputs(drafter: Published, start: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's states of `start` positions, and embeddings of a block."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(start, drafter.tensors["fc.weight"].shape[1], generator=generator)
    return states, torch.randn(drafter.block_size, drafter.hidden, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_published_arithmetic(target, tmp_path, kind):
    published = write(kind, target, tmp_path)
    drafter = load(str(tmp_path), target)  # as `assistant=` does
    assert isinstance(drafter, BlockDrafter) and drafter.label == LABELS.get(kind, "dflash")
    assert drafter.hidden_layers == tuple(layer + 1 for layer in published.outputs)
    first = 0 if published.from_anchor else 1
    assert (drafter.first_slot, drafter.num_depths) == (first, published.block_size - first)
    ids = published.token_ids
    assert torch.equal(drafter.token_ids, ids) if ids is not None else drafter.token_ids is None
    for start in (0, 1, 9):
        states, embeds = inputs(published, start)
        expected = published.block(states, embeds, start)
        for pieces in ([start], [1] * start, [3] * (start // 3) + [start % 3]):
            torch.testing.assert_close(run_block(drafter, states, embeds, pieces), expected, rtol=1e-5, atol=1e-5)


def golden(folder, kind: str) -> tuple[BlockDrafter, torch.Tensor]:
    """The drafter of the golden numbers, with a head of `kind`, and its hidden states."""
    target = new_model("llama", hidden_size=8, vocab_size=10, num_attention_heads=2, num_key_value_heads=1)
    target.get_output_embeddings().weight.data = 0.4 * torch.cos(0.29 * torch.arange(80)).view(10, 8)
    own, config, further = shapes(8, 16, 2, 2, 1, 4, 12), {}, {}
    if kind == "dflash2":
        own |= convolution_shapes(8, 2, 2, 4)
        further = selector_shapes(10, 8, 3)
        config = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 3}
    elif kind not in ("dflash", "causal"):
        further, config = markov_shapes(kind, 10, 10, 8, 3), {"markov_rank": 3, "markov_head_type": kind}
    tensors = waves(own) | waves(further)
    is_anchored = further and kind != "dflash2"
    masks = (kind == "causal",) * 2, (None, None)
    z_lab(Published(tensors, 2, 1, 4, (0, 1), 4, 9, *masks, is_anchored, None, config), 10, folder)
    drafter = BlockDrafter.from_pretrained(folder, target)
    states = torch.cos(0.21 * torch.arange(80)).view(5, 16)
    return drafter, run_block(drafter, states, torch.sin(0.11 * torch.arange(32) + 0.5).view(4, 8))


GOLDEN = {
    "dflash": {
        0: [0.523948, 1.309104, -1.541551, 1.082358, 1.566827, 0.073431, -0.823747, 2.172787],
        3: [-0.425237, 1.269918, -0.040137, -2.171573, 0.892284, 1.172015, -2.445415, -0.492931],
    },
    "causal": {
        0: [0.452995, 1.371835, -1.560062, 1.113644, 1.502762, 0.158814, -0.837832, 2.147529],
        3: [-0.425911, 1.270353, -0.039674, -2.173306, 0.894726, 1.169348, -2.442511, -0.496500],
    },
    "dflash2": {
        0: [1.169513, -0.597665, 0.801796, -0.175294, 0.097713, 0.443859, 0.698600, 0.043577],
        3: [-0.752673, 0.724446, -0.657924, 0.443471, 0.397368, -0.899757, 0.637178, -0.395760],
    },
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_hidden_states_of_the_authors_modules(tmp_path, kind):
    hidden = golden(tmp_path, kind)[1]
    for slot, numbers in GOLDEN[kind].items():
        torch.testing.assert_close(hidden[slot], torch.tensor(numbers), rtol=0, atol=1e-5)


def test_golden_scores_of_dflash2s_selector(tmp_path):
    drafter, hidden = golden(tmp_path, "dflash2")
    lattice = drafter.lattice(hidden[None], torch.tensor([3]), 2)
    assert lattice.tokens[0].tolist() == [[2, 5, 7], [7, 4, 2], [4, 1, 9]]
    scores = torch.tensor([[0.32532, 0.20320, 0.20032], [0.25632, 0.18503, 0.14698], [0.08228, 0.07908, 0.05857]])
    path = torch.stack([lattice.first[0], lattice.given[0, 0, 0], lattice.given[0, 1, 0]])
    torch.testing.assert_close(path, scores.log_softmax(-1), rtol=0, atol=1e-5)


GOLDEN_MARKOV = {
    "vanilla": ([2, 5, 2, 6], [0.55677, 0.68799, -1.09088]),
    "gated": ([5, 2, 5, 9], [-0.04999, 0.29102, -0.83715]),
    "rnn": ([2, 5, 5, 9], [-0.46033, -0.27864, -0.93342]),
}


@pytest.mark.parametrize("kind", GOLDEN_MARKOV)
def test_golden_drafts_of_dsparks_heads(tmp_path, kind):
    drafter, hidden = golden(tmp_path, kind)
    tokens, logits = GOLDEN_MARKOV[kind]
    for width in (1, 10):
        lattice = drafter.lattice(hidden[None], torch.tensor([3]), width)
        assert lattice.tokens[0, :, 0].tolist() == tokens
    scores = torch.empty(10)
    scores[lattice.tokens[0, -1]] = lattice.given[0, -1, 0]
    torch.testing.assert_close(scores[:3].diff(), torch.tensor(logits).diff(), rtol=0, atol=2e-5)


def test_tapped_layers_by_each_convention(target, tmp_path):
    """Lists count layers by what they leave, or by what they read; where both are there, they must agree."""
    published = random_drafter(*sizes(target), outputs=(-1, 1))
    z_lab(published, sizes(target)[1], tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    own = content["dflash_config"]

    def layers(**entries):
        (tmp_path / "config.json").write_text(json.dumps(content | {"dflash_config": own | entries}))
        return BlockDrafter.from_pretrained(tmp_path, target).hidden_layers

    assert layers() == (0, 2)  # 2: what the last of two layers leaves, before the norm
    assert layers(aux_hidden_state_layer_ids=[0, 2]) == (0, 2)
    assert layers(target_layer_ids=None, aux_hidden_state_layer_ids=[0, 1]) == (0, 1)
    assert layers(target_layer_ids=None, eagle_aux_hidden_state_layer_ids=[1, 2]) == (1, 2)
    assert layers(target_layer_ids=None, num_target_layers=3) == (2, 1)  # by the formula: 1, then 1 - 1
    with pytest.raises(ValueError, match="contradict"):
        layers(aux_hidden_state_layer_ids=[0, 1])
    with pytest.raises(ValueError, match=r"`target_layer_ids` is \[0, 2\], .* from -1 to 1"):
        layers(target_layer_ids=[0, 2])
    with pytest.raises(ValueError, match=r"`fc.weight` reads 64 numbers, and 1 layers .* have 32 each"):
        layers(target_layer_ids=[1])
    assert default_layers(36, 5) == [2, 10, 18, 26, 34] and default_layers(36, 1) == [19]


@pytest.mark.parametrize("layout", ["z-lab", "speculators dflash"])
def test_states_are_those_of_the_layers_that_files_mean(tmp_path, monkeypatch, layout):
    """Layer i of the target adds 10 ** i: the taps are embeddings, what layer 0 leaves, and what the last leaves."""
    target = tiny_llama(num_hidden_layers=3, mlp_bias=True, eos_token_id=None)
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.fill_(10.0**number)
    published = random_drafter(32, target.config.vocab_size, outputs=(-1, 0, 2))
    LAYOUTS[layout](published, target.config.vocab_size, tmp_path)
    found, combine = [], BlockDrafter.combine
    monkeypatch.setattr(BlockDrafter, "combine", lambda self, states: found.append(states) or combine(self, states))
    with hf_smartspec.enabled(target):
        text = target.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False, assistant=str(tmp_path))
    states = torch.cat(found)
    embeddings, first, last = states.chunk(3, dim=1)
    torch.testing.assert_close(embeddings, target.get_input_embeddings()(text[0])[: len(states)])
    torch.testing.assert_close(first - embeddings, torch.full_like(first, 1.0))
    torch.testing.assert_close(last - embeddings, torch.full_like(last, 111.0), rtol=0, atol=1e-3)
    assert len(states) > 4  # the prompt's, and those of generated tokens


def test_rotary_embeddings_of_layers_and_factors_of_values(target, tmp_path):
    published = random_drafter(*sizes(target))
    z_lab(published, sizes(target)[1], tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    states, embeds = inputs(published, 9)

    def run(**entries):
        (tmp_path / "config.json").write_text(json.dumps(content | entries))
        return run_block(BlockDrafter.from_pretrained(tmp_path, target), states, embeds)

    kinds = {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 10000.0}}
    before, slow = run(), run(rope_theta=100.0)
    assert not torch.allclose(before, slow, atol=1e-3)
    torch.testing.assert_close(run(rope_parameters=kinds), slow)
    assert not torch.allclose(run(is_neox_style=False), before, atol=1e-3)
    for name, item in published.tensors.items():  # a factor of values is one of their map
        if "v_proj" in name:
            item.mul_(2.0)
    torch.testing.assert_close(run(attention_value_scale=2.0), published.block(states, embeds, 9), rtol=1e-5, atol=1e-5)
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    with pytest.raises(ValueError, match="rotary embeddings of several kinds"):
        run(rope_parameters=kinds, **mixed)


def test_slots_and_masks_by_what_configs_say(target, tmp_path):
    published = random_drafter(*sizes(target), windows=(4, None), causal=(True, False))
    z_lab(published, sizes(target)[1], tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())

    def load(own=None, **entries):
        config = content | entries | {"dflash_config": content["dflash_config"] | (own or {})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return BlockDrafter.from_pretrained(tmp_path, target)

    def masks(**entries):
        return [(layer.causal, layer.window) for layer in load(**entries).layers]

    assert masks() == [(True, 4), (False, None)]  # sliding layers are causal, others are not
    assert masks(is_causal=False, own={"causal": True}) == [(False, 4), (False, None)]
    assert masks(own={"causal": True}) == [(True, 4), (True, None)]
    assert masks(own={"causal_head": True}) == [(True, 4), (True, None)]
    assert masks(own={"causal": False, "causal_head": True}) == [(False, 4), (False, None)]
    assert masks(own={"use_swa": True, "swa_window_size": 3}) == [(False, 3), (False, 3)]
    slots = [(item.first_slot, item.num_depths) for item in (load(), load(own={"sample_from_anchor": True}))]
    assert slots == [(1, 5), (0, 6)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_slot_sees_later_ones_unless_blocks_are_causal_and_no_further_back_than_its_window(target, tmp_path, causal):
    published = random_drafter(*sizes(target), windows=(5,), causal=causal, layers=1, outputs=(0,), block_size=4)
    z_lab(published, sizes(target)[1], tmp_path)
    drafter = BlockDrafter.from_pretrained(tmp_path, target)
    states, embeds = inputs(published, 9)

    def moved(states=states, embeds=embeds):
        return [bool(item) for item in (run_block(drafter, states, embeds) - before).abs().amax(-1) > 1e-6]

    before = run_block(drafter, states, embeds)
    last = embeds.clone()
    last[-1] += 1
    assert moved(embeds=last) == [not causal, not causal, not causal, True]
    for position, seen in ((4, [False] * 4), (5, [True, False, False, False]), (6, [True, True, False, False])):
        changed = states.clone()
        changed[position] += 1
        assert moved(states=changed) == seen  # a window of 5 at position 9 begins with position 5


def test_blocks_embed_the_anchor_and_mask_tokens_as_the_target_does(tmp_path):
    """They have Gemma's factor, and not Muse's norm; a file may bring an embedding of the mask token."""
    target = shared_model("gemma2")
    hidden, vocab = sizes(target)
    published = random_drafter(hidden, vocab)
    z_lab(published, vocab, tmp_path)
    table, anchors = target.get_input_embeddings().weight * hidden**0.5, torch.tensor([3, 7])
    embeds = BlockDrafter.from_pretrained(tmp_path, target).embed(anchors, 4)
    torch.testing.assert_close(embeds, table[torch.tensor([[3, 96, 96, 96], [7, 96, 96, 96]])])
    mask = torch.randn(hidden)
    torch.save({"embedding": mask, "mask_token_id": 5}, tmp_path / "mask_embedding.pt")
    drafter = BlockDrafter.from_pretrained(tmp_path, target)
    torch.testing.assert_close(drafter.embed(anchors, 3)[:, 1:], mask.expand(2, 2, -1))
    drafter.save_pretrained(tmp_path / "saved")
    again = BlockDrafter.from_pretrained(tmp_path / "saved", target)
    assert torch.equal(again.embed(anchors, 3), drafter.embed(anchors, 3)) and again.spec.mask_token == 5


def test_copies_of_the_targets_are_dropped_and_other_embeddings_and_heads_used(target, tmp_path):
    published = random_drafter(*sizes(target), has_embedding=True)
    own = published.tensors["embed_tokens.weight"].clone()
    published.tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()
    for table in (own, target.get_input_embeddings().weight.detach()):
        published.tensors["embed_tokens.weight"] = table
        z_lab(published, sizes(target)[1], tmp_path)
        drafter = BlockDrafter.from_pretrained(tmp_path, target)
        assert drafter.lm_head is None and (drafter.embed_tokens is not None) == (table is own)
        torch.testing.assert_close(drafter.embed(torch.tensor([4]), 2)[0], table[[4, published.mask_token]])


def test_d2t_tells_the_number_of_tokens_where_the_config_does_not(target, tmp_path):
    published = random_drafter(*sizes(target), own_vocab=60)
    z_lab(published, sizes(target)[1], tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert torch.equal(BlockDrafter.from_pretrained(tmp_path, target).token_ids, published.token_ids)


def test_lattice_of_independent_depths_with_a_vocabulary_of_its_own(target, tmp_path):
    """d2t moves every token of the drafter to the target's."""
    published = random_drafter(*sizes(target), own_vocab=60)
    z_lab(published, sizes(target)[1], tmp_path)
    drafter = BlockDrafter.from_pretrained(tmp_path, target)
    hidden = torch.randn(3, 6, published.hidden)
    expected = (hidden[:, 1:] @ published.tensors["lm_head.weight"].T).log_softmax(-1)
    lattice = drafter.lattice(hidden, torch.tensor([1, 2, 3]), 60)
    assert lattice.tokens.shape == (3, 5, 60) and lattice.given.shape == (3, 4, 1, 60)
    assert sorted(lattice.tokens[0, 0].tolist()) == published.token_ids.tolist()
    scores = torch.cat([lattice.first[:, None, None], lattice.given], dim=1)[:, :, 0]
    places = torch.searchsorted(published.token_ids, lattice.tokens)
    torch.testing.assert_close(scores, expected.gather(-1, places))
    assert (scores.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(target, tmp_path, kind):
    published = write(kind, target, tmp_path)
    drafter = BlockDrafter.from_pretrained(tmp_path, target)
    drafter.save_pretrained(tmp_path / "saved", base_model_name_or_path="mine")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["base_model_name_or_path"] == "mine"
    again = BlockDrafter.from_pretrained(tmp_path / "saved", target)
    states, embeds = inputs(published, 7)
    torch.testing.assert_close(run_block(again, states, embeds), run_block(drafter, states, embeds))
    lattices = [item.lattice(embeds[None], torch.tensor([3]), 4) for item in (drafter, again)]
    for one, other in zip(*lattices):  # files lie anywhere in memory, and products of odd places round otherwise
        torch.testing.assert_close(one, other)
