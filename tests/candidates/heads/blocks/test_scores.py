"""What the heads of block drafters say of candidates: against loops over parents and children."""

import json

import pytest
import torch

from hf_smartspec.candidates.heads.blocks import scores
from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter

from ....models import shared_model
from .forwards import run_block
from .published import LAYOUTS, markov_step, random_drafter, z_lab


@pytest.fixture(scope="module")
def target():
    return shared_model("llama")


def load(folder, target, layout="z-lab", **options):
    published = random_drafter(target.config.hidden_size, target.config.vocab_size, **options)
    LAYOUTS[layout](published, target.config.vocab_size, folder)
    return published, BlockDrafter.from_pretrained(folder, target)


def slots(published, num_rows=3, seed=2) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states after the final norm `[R, S, hidden]`, and anchors."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, published.block_size, published.hidden, generator=generator)
    return hidden, torch.randint(97, (num_rows,), generator=generator)


def base_logits(published, target, hidden: torch.Tensor) -> torch.Tensor:
    head = published.tensors.get("lm_head.weight", target.get_output_embeddings().weight)
    return hidden[:, 0 if published.from_anchor else 1 :] @ head.T


def test_dflash2_without_convolutions_and_codebooks_is_dflash(target, tmp_path):
    options = {"convolution": (2, 8), "selector_rank": 3}
    published = random_drafter(target.config.hidden_size, target.config.vocab_size, **options)
    for name, tensor in published.tensors.items():
        if "codebook" in name or "kernel_projection" in name:
            tensor.zero_()
        elif "base_kernel" in name:
            tensor.zero_()[:, 0] = 1
    z_lab(published, target.config.vocab_size, tmp_path / "second")
    extra = ("_conv.", "candidate_selector.")
    published.tensors = {name: item for name, item in published.tensors.items() if not any(e in name for e in extra)}
    z_lab(published, target.config.vocab_size, tmp_path / "first")
    first, second = (BlockDrafter.from_pretrained(tmp_path / name, target) for name in ("first", "second"))
    assert (first.label, second.label) == ("dflash", "dflash2")
    states, embeds = torch.randn(7, 64), torch.randn(6, 32)
    hidden = run_block(first, states, embeds)
    torch.testing.assert_close(run_block(second, states, embeds), hidden)
    one, other = (item.lattice(hidden[None], torch.tensor([1]), 5) for item in (first, second))
    assert torch.equal(one.tokens, other.tokens)
    scores = one.given.log_softmax(-1).expand_as(other.given)  # among the candidates only
    torch.testing.assert_close(other.given, scores)


@pytest.mark.parametrize("factors", [{}, {"output_multiplier": 0.25, "final_logit_softcapping": 2.0}], ids=len)
def test_dflash2s_scores_are_those_of_a_loop_over_pairs(target, tmp_path, factors):
    config = {"selector_top_k": 4} | factors
    published, drafter = load(tmp_path, target, convolution=(2, 8), selector_rank=3, config=config)
    hidden, anchors = slots(published)
    lattice = drafter.lattice(hidden, anchors, 2)  # the width is the selector's own
    own = published.tensors
    before, after = (own[f"candidate_selector.{kind}_codebook"] for kind in ("predecessor", "successor"))
    projected = hidden[:, 1:] @ own["candidate_selector.hidden_projection.weight"].T
    unary = base_logits(published, target, hidden) * factors.get("output_multiplier", 1)
    if factors:
        unary = 2 * torch.tanh(unary / 2)
    for row in range(3):
        for depth in range(5):
            best = unary[row, depth].topk(4)
            assert lattice.tokens[row, depth].tolist() == best.indices.tolist()
            parents = lattice.tokens[row, depth - 1] if depth else anchors[row : row + 1]
            for place, parent in enumerate(parents.tolist()):
                scores = [
                    float(score + (before[parent] * projected[row, depth] * after[token]).sum())
                    for score, token in zip(*best)
                ]
                found = lattice.given[row, depth - 1, place] if depth else lattice.first[row]
                torch.testing.assert_close(found, torch.tensor(scores).log_softmax(-1))


def all_scores(published, target, hidden, anchor, path, kind):
    """Log-probabilities of all tokens after each token of a path: the loop of DSpark."""
    logits = base_logits(published, target, hidden[None])[0]
    state = torch.zeros(4)
    first = 0 if published.from_anchor else 1
    if first:
        _, state = markov_step(head_of(published), anchor, state, hidden[0])
    scores = []
    for depth, token in enumerate([anchor, *path]):
        added, state = markov_step(head_of(published), token, state, hidden[depth + first])
        scores.append((logits[depth] + added).log_softmax(-1))
    return scores


def head_of(published):
    return {name: item for name, item in published.tensors.items() if name.startswith("markov_head.")}


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("own_vocab", [None, 60])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dsparks_scores_are_those_of_a_loop_along_each_path(target, tmp_path, kind, own_vocab, from_anchor):
    options = {"markov": kind, "own_vocab": own_vocab, "from_anchor": from_anchor}
    published, drafter = load(tmp_path, target, "speculators dspark", **options)
    ids = torch.arange(97) if published.token_ids is None else published.token_ids
    places = {token: place for place, token in enumerate(ids.tolist())}
    hidden, anchors = slots(published)
    num = len(ids)
    whole, narrow = (drafter.lattice(hidden, anchors, width) for width in (num, 3))
    for row in range(3):
        anchor, path, depths = int(anchors[row]), [], drafter.num_depths
        weights, paths = [0.0], [[]]  # of the likeliest path to each candidate
        for depth in range(depths):
            scores = all_scores(published, target, hidden[row], anchor, path, kind)[depth]
            path.append(int(ids[scores.argmax()]))  # the authors' greedy draft
            assert int(whole.tokens[row, depth, 0]) == int(narrow.tokens[row, depth, 0]) == path[-1]
            candidates = narrow.tokens[row, depth].tolist()
            found = narrow.given[row, depth - 1, 0] if depth else narrow.first[row]
            torch.testing.assert_close(found, scores[[places[token] for token in candidates]])
            if depth < 3:
                order = [places[token] for token in whole.tokens[row, depth].tolist()]
                given = []
                for place in range(len(paths) if depth < 2 else 4):
                    scores = all_scores(published, target, hidden[row], anchor, paths[place], kind)[depth][order]
                    found = whole.given[row, depth - 1, place] if depth else whole.first[row]
                    torch.testing.assert_close(found, scores)
                    given.append(weights[place] + scores)
                if depth < 2:
                    given, before = torch.stack(given), paths
                    origins = given.argmax(0)
                    origins[0] = 0  # the greedy path's state is its own
                    weights = given.amax(0).tolist()
                    paths = [before[origin] + [int(ids[order[c]])] for c, origin in enumerate(origins.tolist())]


@pytest.mark.parametrize("shifted", [True, False])
def test_dominos_greedy_draft_is_that_of_a_loop(target, tmp_path, shifted):
    """The first proposal is the plain one; after it, a GRU has read the anchor and the proposals so far."""
    published, drafter = load(tmp_path, target, is_domino=True, from_anchor=shifted)
    assert (drafter.first_slot, drafter.num_depths) == (0 if shifted else 1, 5)
    hidden, anchors = slots(published)
    lattice, table = drafter.lattice(hidden, anchors, 4), target.get_input_embeddings().weight
    own = published.tensors
    gru = torch.nn.GRU(32, 3, bias=False)
    gru.load_state_dict({name.removeprefix("prefix_gru."): item for name, item in own.items() if "gru" in name})
    for row in range(3):
        tokens = [int(anchors[row])]
        for depth in range(5):
            h = hidden[row, depth + drafter.first_slot]
            logits = h @ target.get_output_embeddings().weight.T
            if depth:
                state = gru(table[tokens][:, None])[0][-1, 0]
                inner = torch.nn.functional.silu(own["embed_proj.0.weight"] @ torch.cat([h, state]))
                logits = logits + own["embed_proj.2.weight"] @ inner
            best = logits.log_softmax(-1).topk(4)
            assert lattice.tokens[row, depth].tolist() == best.indices.tolist()
            found = lattice.given[row, depth - 1, 0] if depth else lattice.first[row]
            torch.testing.assert_close(found, best.values)
            tokens.append(int(best.indices[0]))


@pytest.mark.parametrize("own_vocab", [None, 60])
def test_xpress_refines_all_slots_in_passes(target, tmp_path, own_vocab):
    published, drafter = load(tmp_path, target, "speculators xpress", is_xpress=True, own_vocab=own_vocab)
    ids = torch.arange(97) if own_vocab is None else published.token_ids
    hidden, anchors = slots(published)
    ahead = torch.tensor([5, 6, 7])
    own = {name.removeprefix("refiner_head.").removesuffix(".weight"): x for name, x in published.tensors.items()}
    base = base_logits(published, target, hidden)
    for row in range(3):
        logits, shared = base[row], own["down_g"] @ hidden[row].mean(0)
        for _ in range(3):
            before = [int(ahead[row]), int(anchors[row]), *ids[logits.argmax(-1)][:-1].tolist()]
            y = []
            for slot in range(6):
                inputs = [own["down_h"] @ hidden[row, slot], shared, own["token_embed"][before[slot]]]
                y.append(own["in_proj"] @ torch.cat(inputs))
            mixed = [y[j] + sum(own["mix_l"][:, j, i] * y[i] for i in range(j + 1)) for j in range(6)]
            for slot, item in enumerate(mixed):
                inner = torch.nn.functional.silu(own["mlp_gate"] @ item) * (own["mlp_up"] @ item)
                mixed[slot] = own["readout"] @ (item + own["mlp_down"] @ inner)
            logits = base[row] + torch.stack(mixed[1:])
        lattice = drafter.lattice(hidden, anchors, 4, before=ahead)
        best = logits.log_softmax(-1).topk(4)
        assert torch.equal(lattice.tokens[row], ids[best.indices])
        torch.testing.assert_close(torch.cat([lattice.first[row][None], lattice.given[row, :, 0]]), best.values)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_dspark_weighs_the_likeliest_tokens_only(target, tmp_path, monkeypatch, kind):
    """What follows from the token before moves probability among these, and none to or from others."""
    monkeypatch.setattr(scores, "SHORTLIST", 12)
    published, drafter = load(tmp_path, target, "deepspec", markov=kind, from_anchor=True)
    hidden, anchors = slots(published)
    lattice = drafter.lattice(hidden, anchors, 5)
    for row in range(3):
        path = lattice.tokens[row, :, 0].tolist()
        whole = all_scores(published, target, hidden[row], int(anchors[row]), path[:-1], kind)
        for depth, base in enumerate(base_logits(published, target, hidden)[row].log_softmax(-1)):
            places = base.topk(12).indices
            expected = whole[depth][places].log_softmax(-1) + base[places].logsumexp(-1)
            best = expected.topk(5)
            assert lattice.tokens[row, depth].tolist() == places[best.indices].tolist()
            torch.testing.assert_close(lattice.given[row, depth - 1, 0] if depth else lattice.first[row], best.values)


def test_dspark_without_a_bias_of_tokens_is_deepspecs_dflash(target, tmp_path):
    published = random_drafter(32, 97, markov="vanilla", from_anchor=True)
    published.tensors["markov_head.markov_w2.weight"].zero_()
    LAYOUTS["deepspec"](published, 97, tmp_path / "dspark")
    published.tensors = {name: item for name, item in published.tensors.items() if "markov" not in name}
    published.config = {}
    LAYOUTS["deepspec"](published, 97, tmp_path / "dflash")
    drafters = [BlockDrafter.from_pretrained(tmp_path / name, target) for name in ("dspark", "dflash")]
    assert [item.label for item in drafters] == ["dspark", "dflash"]
    hidden, anchors = slots(published)
    one, other = (item.lattice(hidden, anchors, 4) for item in drafters)
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.first, other.first)
    torch.testing.assert_close(one.given, other.given.expand_as(one.given))


@pytest.mark.parametrize("reads", ["hidden", "markov"])
def test_confidence_is_of_a_child_given_its_parent(target, tmp_path, reads):
    published, drafter = load(tmp_path, target, "deepspec", markov="vanilla", confidence=reads, from_anchor=True)
    hidden, anchors = slots(published)
    lattice = drafter.lattice(hidden, anchors, 3)
    weight, bias = (published.tensors[f"confidence_head.proj.{kind}"] for kind in ("weight", "bias"))
    assert lattice.confidence.shape == (3, 6, 3)
    for row in range(3):
        for depth in range(6):
            for place in range(3):
                parent = lattice.tokens[row, depth - 1, place] if depth else anchors[row]
                x = hidden[row, depth]
                if reads == "markov":
                    x = torch.cat([x, published.tensors["markov_head.markov_w1.weight"][parent]])
                torch.testing.assert_close(
                    lattice.confidence[row, depth, place], torch.sigmoid(weight[0] @ x + bias[0])
                )


def test_shorter_blocks_have_fewer_depths(target, tmp_path):
    for name, options in (("dflash", {}), ("dspark", {"markov": "rnn", "from_anchor": True})):
        published, drafter = load(tmp_path / name, target, **options)
        hidden, anchors = slots(published)
        whole, short = drafter.lattice(hidden, anchors, 3), drafter.lattice(hidden[:, :4], anchors, 3)
        num = 4 - drafter.first_slot
        assert torch.equal(short.tokens, whole.tokens[:, :num])
        torch.testing.assert_close(short.given, whole.given[:, : num - 1])
        only = drafter.lattice(hidden[:, : drafter.first_slot + 1], anchors, 3)
        assert only.given.shape[:2] == (3, 0)


SIGNS = {  # entries, tensors of a kind -> its label
    "tensors before names": ({"architectures": ["DFlashDraftModel"]}, {"markov": "gated"}, "dspark"),
    "a selector in a file that says dspark": (
        {"architectures": ["Qwen3DSparkModel"]},
        {"convolution": (2, 8), "selector_rank": 3},
        "dflash2",
    ),
    "causal head": ({"dflash_config": {"causal_head": True}}, {}, "jetspec"),
    "rank 0": ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, {}, "dflash"),
}


@pytest.mark.parametrize("case", SIGNS)
def test_kinds_by_tensors_then_by_names(target, tmp_path, case):
    entries, options, label = SIGNS[case]
    published = random_drafter(32, 97, **options)
    z_lab(published, 97, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config["dflash_config"] | entries.get("dflash_config", {})
    (tmp_path / "config.json").write_text(json.dumps(config | entries | {"dflash_config": nested}))
    drafter = BlockDrafter.from_pretrained(tmp_path, target)
    assert drafter.label == label
    drafter.save_pretrained(tmp_path / "saved")
    assert BlockDrafter.from_pretrained(tmp_path / "saved", target).label == label


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "missing: candidate_selector.hidden_projection.weight"),
        ({"markov_rank": 4}, "missing: markov_head.markov_w1.weight"),
        ({"dspark_block_size": 5}, "DeepSeek V4"),
    ],
)
def test_a_kind_that_is_named_needs_its_tensors(target, tmp_path, entries, message):
    z_lab(random_drafter(32, 97, config=entries), 97, tmp_path)
    with pytest.raises(ValueError, match=message):
        BlockDrafter.from_pretrained(tmp_path, target)
