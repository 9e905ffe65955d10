"""Published heads of EAGLE: their files, their logits behind texts and along drafts, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_smartspec.candidates.heads.eagle.files import is_eagle_checkpoint
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.kinds import load
from hf_smartspec.target_model.drafters.features import FeatureForward

from ...models import new_model, shared_model
from .eagle_forwards import check, run, sizes, texts
from .published_eagle import LAYOUTS, Published, random_heads


@pytest.fixture
def target():
    return shared_model("llama")


# Of every layout some heads: (layout, what they have).
KINDS = {
    "1, no bias": ("1", {}),
    "1, bias": ("1", {"has_bias": True}),
    "1, wide heads": ("1", {"head_dim": 16}),
    "3": ("3", {"third": True, "layers": (1, 1, 0), "own_vocab": 60}),
    "3, wide heads": ("3", {"third": True, "layers": (1, 1, 0), "own_vocab": 60, "head_dim": 16}),
    "3, whole vocabulary": ("3", {"third": True, "layers": (1, 1, 0), "own_vocab": 97}),
    "SpecForge": ("SpecForge", {"third": True, "layers": (2, 1, 1), "own_vocab": 60}),
    "speculators": ("speculators", {"third": True, "layers": (0, 2, 1), "own_vocab": 60}),
    "speculators, norms": (
        "speculators",
        {"third": True, "layers": (0, 2, 1), "own_vocab": 60, "has_norms": True, "head_dim": 16},
    ),
    "speculators, norm before": (
        "speculators",
        {"third": True, "layers": (1, 2), "own_vocab": 60, "norm_before_residual": True, "has_input_norm": True},
    ),
    "speculators, norm of each": (
        "speculators",
        {"third": True, "layers": (0, 2, 1), "own_vocab": 60, "has_fc_norm": True},
    ),
    "speculators, norm of the output": (
        "speculators",
        {"third": True, "layers": (0, 2, 1), "own_vocab": 60, "norm_output": True},
    ),
    "speculators, five states, three layers": (
        "speculators",
        {"third": True, "layers": (0, 2, 1, 1, 0), "own_vocab": 60, "num_layers": 3, "has_norms": True, "head_dim": 16},
    ),
    "speculators, all": (
        "speculators",
        {
            "third": True,
            "layers": (1, 0),
            "own_vocab": 60,
            "num_layers": 2,
            "window": 5,
            "sliding": (1,),
            "has_fc_norm": True,
            "norm_before_residual": True,
            "norm_output": True,
        },
    ),
    "speculators, P-EAGLE": (
        "speculators",
        {"third": True, "layers": (1, 0), "own_vocab": 60, "mask_token": 96},
    ),
    "3, two layers": ("3", {"third": True, "layers": (1, 1, 0), "own_vocab": 60, "num_layers": 2}),
    "1, two layers": ("1", {"num_layers": 2}),
    "1, window": ("1", {"has_bias": True, "window": 5}),
    "SpecForge, window": ("SpecForge", {"third": True, "layers": (2, 1, 1), "own_vocab": 60, "window": 5}),
}


def write(kind: str, target, folder) -> Published:
    layout, options = KINDS[kind]
    hidden, vocab = sizes(target)
    published = random_heads(hidden, vocab, **options)
    if published.head_dim != hidden // published.heads:
        published.config["head_dim"] = published.head_dim
    if layout in ("1", "3"):  # which bring a copy of the target's embeddings, or have learnt their own
        published.tensors["embed_tokens.weight"] = torch.randn(
            vocab, hidden, generator=torch.Generator().manual_seed(5)
        )
    LAYOUTS[layout](published, vocab, folder)
    return published


@pytest.mark.parametrize("lengths", [(7,), (9, 2, 12, 5, 9), tuple(range(2, 18))], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_published_arithmetic(target, tmp_path, kind, lengths):
    published = write(kind, target, tmp_path)
    heads = EagleHeads.from_pretrained(tmp_path, target)
    assert heads.is_third == published.third and heads.hidden_layers == tuple(published.layers)
    ids = published.token_ids
    assert torch.equal(heads.token_ids, ids) if ids is not None else heads.token_ids is None
    items = texts(published, target, lengths)
    forward = FeatureForward(heads)
    check(run(forward, [forward.add() for _ in items], items), published, target, items)


@pytest.mark.parametrize("kind", ["1, bias", "3", "speculators, norms", "SpecForge, window", "speculators, all"])
def test_logits_in_pieces_behind_cuts_and_in_rows_that_begin_alike(target, tmp_path, kind):
    published = write(kind, target, tmp_path)
    items = texts(published, target, (40, 5, 23))
    forward = FeatureForward(EagleHeads.from_pretrained(tmp_path, target))
    forward.prefill_chunk = 7
    rows = [forward.add() for _ in items]
    check(run(forward, rows, items), published, target, items)
    # The drafts, and some of the texts, are taken back.
    cuts = [11, 3, 0]
    for row, cut in zip(rows, cuts):
        forward.cut(row, cut)
    check(run(forward, rows, items, cuts), published, target, items)
    other = [forward.add() for _ in items]
    for row, earlier in zip(other, rows):
        forward.reuse(row, earlier, 3)
    check(run(forward, other, items, [3, 3, 3]), published, target, items)
    for row in rows + other:
        forward.remove(row)
    assert not forward.cache.rows


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_recognised_and_what_is_saved_is_loaded(target, tmp_path, kind):
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    published = write(kind, target, tmp_path / "first")
    items = texts(published, target, (9, 6))
    before = None
    for name, further in (("first", "second"), ("second", "third"), ("third", None)):
        assert is_eagle_checkpoint(str(tmp_path / name))
        heads = load(str(tmp_path / name), target)
        assert isinstance(heads, EagleHeads) and heads.name_or_path == str(tmp_path / name)
        for parameter in heads.parameters():  # files lie anywhere in memory, and products of odd places round otherwise
            parameter.data = parameter.data.clone()
        forward = FeatureForward(heads)
        logits = torch.stack(run(forward, [forward.add() for _ in items], items))
        assert before is None or torch.equal(logits, before)
        before = logits
        if further:
            heads.save_pretrained(tmp_path / further, base_model_name_or_path="mine")
    assert json.loads((tmp_path / "third" / "config.json").read_text())["base_model_name_or_path"] == "mine"
    ids = load_file(tmp_path / "third" / "model.safetensors").get("t2d")
    assert ids is None or torch.equal(ids.nonzero()[:, 0], published.token_ids)


def test_layers_are_the_authors_own_where_nobody_names_any(tmp_path):
    target = new_model("llama", num_hidden_layers=8)
    write("3", target, tmp_path)
    assert EagleHeads.from_pretrained(tmp_path, target).hidden_layers == (2, 4, 5)
    assert EagleHeads.from_pretrained(tmp_path, target, hidden_layers=(1, 2, 3)).hidden_layers == (1, 2, 3)


@pytest.mark.parametrize("kind", ["1, no bias", "3"])
def test_dtype_is_the_targets(tmp_path, kind):
    target = new_model("llama").bfloat16()
    published = write(kind, target, tmp_path)
    heads = EagleHeads.from_pretrained(tmp_path, target)
    assert heads.dtype == torch.bfloat16 and {item.dtype for item in heads.parameters()} == {torch.bfloat16}
    items = texts(published, target, (9, 6))
    forward = FeatureForward(heads)
    for logits in run(forward, [forward.add() for _ in items], items):
        assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


def test_other_folders_say_nothing_of_eagle(tmp_path):
    assert not is_eagle_checkpoint(str(tmp_path))
    config = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert not is_eagle_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "dflash", "draft_vocab_size": 9}))
    assert not is_eagle_checkpoint(str(tmp_path))


def changed(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("kind", ["1, no bias", "3"])
def test_heads_of_other_targets_are_refused_with_both_shapes(target, tmp_path, kind):
    write(kind, target, tmp_path)
    hidden, vocab = sizes(target)
    other = new_model("llama", hidden_size=48)
    with pytest.raises(ValueError, match=r"hidden size 48 and 97 tokens: `fc` \(32, \d+\) in place of"):
        EagleHeads.from_pretrained(tmp_path, other)
    other = new_model("llama", vocab_size=50)
    with pytest.raises(
        ValueError, match=rf"50 tokens: `embed_tokens` \({vocab}, {hidden}\) in place of \(50, {hidden}\)"
    ):
        EagleHeads.from_pretrained(tmp_path, other)
    with pytest.raises(ValueError, match="97 tokens do not fit one of 50"):
        EagleHeads.from_pretrained(tmp_path, target).check_fit(other)


@pytest.mark.parametrize("missing", ["fc", "self_attn.k_proj", "mlp.up_proj", "post_attention_layernorm", "norm"])
def test_what_is_missing_is_named(target, tmp_path, missing):
    write("speculators", target, tmp_path)
    name = f"{missing}.weight" if missing in ("fc", "norm") else f"layers.0.{missing}.weight"
    changed(tmp_path, lambda tensors: tensors.pop(name))
    said = "holds no heads of EAGLE" if missing == "fc" else rf"`{missing.rpartition('.')[2]}` \(missing\) in place of"
    with pytest.raises(ValueError, match=rf"{tmp_path}.*{said}"):
        EagleHeads.from_pretrained(tmp_path, target)


CHANGES = {
    "ids": (lambda tensors: tensors["d2t"].add_(60), "`d2t` names tokens beyond the target's 97"),
    "few ids": (lambda tensors: tensors.update(d2t=tensors["d2t"][:7]), r"\(60, 32\) does not fit 7 tokens"),
    "no ids": (lambda tensors: tensors.pop("d2t"), r"\(60, 32\) does not fit 97 tokens.* no `d2t`"),
    "norm": (
        lambda tensors: tensors.update({"layers.0.self_attn.k_norm.weight": torch.ones(3)}),
        r"`k_norm` \(3,\) in place of \(16,\)",
    ),
    "one layer in the config": (
        lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.weight": torch.ones(3, 3)}),
        r"config has 1 layers .* tensors of 2",
    ),
    "norms of states": (
        lambda tensors: tensors.update({"fc_norm.0.weight": torch.ones(32)}),
        r"`fc_norm_1` \(missing\) in place of \(32,\), `fc_norm_2` \(missing\)",
    ),
    "norms of more states": (
        lambda tensors: tensors.update({f"fc_norm.{number}.weight": torch.ones(32) for number in range(4)}),
        "left over: fc_norm_3",
    ),
    "norms of all and of each": (
        lambda tensors: tensors.update(
            {"input_norm.weight": torch.ones(96)} | {f"fc_norm.{number}.weight": torch.ones(32) for number in range(3)}
        ),
        r"of all hidden states \(`input_norm`\) and of each",
    ),
    "a norm in a further layer": (
        lambda tensors: tensors.update({"layers.1.hidden_norm.weight": torch.ones(32)}),
        "not known: layers.1.hidden_norm.weight",
    ),
}


def test_layers_that_the_config_names_must_be_there(target, tmp_path):
    write("speculators", target, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"`q_proj_1` \(missing\) in place of \(32, 32\)"):
        EagleHeads.from_pretrained(tmp_path, target)


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_said(target, tmp_path, change):
    write("speculators, norms", target, tmp_path)
    changed(tmp_path, CHANGES[change][0])
    with pytest.raises(ValueError, match=CHANGES[change][1]) as error:
        EagleHeads.from_pretrained(tmp_path, target)
    assert str(tmp_path) in str(error.value)
