"""MTP layers that draft: what transformers drafts with them, in batches and as trees; the tokens of plain decoding."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5Config
from transformers.generation import candidate_generator

import hf_smartspec
from hf_smartspec import Engine, MtpLayers, SmartSpecConfig
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates
from hf_smartspec.candidates.models import growing
from hf_smartspec.prepare.sources import Drafters, resolve
from hf_smartspec.target_model.drafters.features import FeatureForward
from hf_smartspec.target_model.layout.rows import RowInput

from ...covering import exhaustive
from ...generate.helpers import prompts
from ...models import VOCAB_SIZE, new_model, shared_model
from ...serving.helpers import TIMEOUT
from .fitted import fitted_mtp
from .mtp_targets import HYBRIDS, TARGETS, load_target, write_target

LENGTHS = (9, 5, 12)
NUM_TOKENS = 24
GREEDY = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "seed": 3, "temperature": 0.7}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "chunks": GREEDY | {"prefill_chunk_size": 4}}


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module")
def targets(tmp_path_factory, patch):
    """Targets by name and number of MTP layers, made when they are asked for."""
    made = {}

    def make(name="glm4_moe", num_layers=1):
        if name not in TARGETS:
            pytest.skip("recurrent layers of this transformers are not packed")
        if (name, num_layers) not in made:
            folder = tmp_path_factory.mktemp(name)
            write_target(name, folder, num_layers)
            made[name, num_layers] = load_target(folder, patch)
        return made[name, num_layers]

    return make


def drafts_of_transformers(target, ids, monkeypatch):
    """What transformers drafts for one sequence, by the length of the text."""
    drafts, own = {}, candidate_generator.MTPCandidateGenerator.get_candidates

    def spy(self, input_ids, *args, **kwargs):
        candidates, logits = own(self, input_ids, *args, **kwargs)
        drafts[input_ids.shape[1]] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    monkeypatch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", spy)
    target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, use_mtp=True)
    return {length: draft for length, draft in drafts.items() if draft}


@torch.no_grad()
def drafts_of_plain_form(target, ids, num_drafts=2):
    """What the MTP layer of Qwen's files drafts for one sequence, without a cache, by the length of the text."""
    tensors = load_file(Path(target.config.name_or_path) / "model.safetensors")
    prefix = "mtp.layers.0."
    own = {name.removeprefix(prefix): item for name, item in tensors.items() if name.startswith(prefix)}
    experts = [
        [own.pop(f"mlp.experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
        for number in range(getattr(target.config, "num_experts", 0))
    ]
    if experts:
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(item[:2]) for item in experts])
        own["mlp.experts.down_proj"] = torch.stack([item[2] for item in experts])
    block = copy.deepcopy(target.base_model.layers[-1])
    block.load_state_dict(own)

    def norm(x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + tensors[f"mtp.{name}.weight"])

    text = target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0]
    states, drafts = target.base_model(text[None]).last_hidden_state[0], {}
    for length in range(ids.shape[1] + 1, len(text)):
        tokens, known = text[:length], states[: length - 1]
        for _ in range(num_drafts):
            embedded = target.get_input_embeddings()(tokens[1:])
            x = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(known, "pre_fc_norm_hidden")], dim=-1)
            x = (x @ tensors["mtp.fc.weight"].T)[None]
            output = norm(
                block(x, target.base_model.rotary_emb(x, torch.arange(length)[None, : x.shape[1]]))[0], "norm"
            )
            token = target.get_output_embeddings()(output[-1:]).argmax(-1)
            tokens, known = torch.cat([tokens, token]), torch.cat([known, output[-1:]])
            length += 1
        drafts[length - num_drafts] = tokens[-num_drafts:].tolist()
    return drafts


class Spy(FeatureCandidates):
    """Remembers its drafts, by the prompt's length, its first tokens and the length of the text."""

    def __init__(self, *args, reuses=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafts, self.texts = {}, {}
        self.reuses, self.num_reused = reuses, 0

    def begin(self, request):
        self.texts[request.request_id] = len(request.prompt), *request.prompt[:4].tolist()
        if not self.reuses:
            request.shares_with = None
        num = super().begin(request)
        self.num_reused = max(self.num_reused, num)
        return num

    def propose(self, request_ids, max_nodes, price=None):
        trees = super().propose(request_ids, max_nodes, price)
        for name, tree in zip(request_ids, trees):
            self.drafts[self.texts[name], len(self._states[name].tokens) + 1] = tree
        return trees


@pytest.mark.parametrize(
    ("name", "num_layers", "way"),
    [
        ("glm4_moe", 2, "whole"),
        ("deepseek_v3", 3, "chunks"),
        ("qwen3_next", 1, "chunks"),
        *exhaustive(
            ("qwen3_5_text", 1, "whole"),
            ("qwen3_5_moe_text", 1, "chunks"),
            ("mellum", 1, "chunks"),
            ("glm4_moe", 1, "whole"),
            ("glm4_moe", 1, "chunks"),
            ("mellum", 1, "whole"),
            ("deepseek_v3", 1, "whole"),
        ),
    ],
)
def test_drafts_are_those_of_transformers(targets, name, num_layers, way, monkeypatch):
    """
    Or of a plain form, where transformers knows of no layer. Of a batch, whose prompts are run in pieces or not: the
    first branches of its trees.
    """
    target = targets(name, num_layers)
    if name not in HYBRIDS and getattr(target.config, "num_mtp_layers", None) is None:
        pytest.skip("this transformers knows no MTP layers of these models")
    inputs = prompts(LENGTHS)
    texts = [row[mask.bool()] for row, mask in zip(*inputs.values())]
    expected = {}
    for text in texts:
        if name in HYBRIDS:
            found = drafts_of_plain_form(target, text[None])
        else:
            found = drafts_of_transformers(target, text[None], monkeypatch)
        expected |= {((len(text), *text[:4].tolist()), length): draft for length, draft in found.items()}
    layers = MtpLayers.from_pretrained("mtp", target)
    assert layers.num_layers == num_layers and layers.dtype == target.dtype
    source = Spy(layers, num_nodes=2 * num_layers, width=2)
    options = GREEDY | ({"prefill_chunk_size": 3} if way == "chunks" else {})
    with hf_smartspec.enabled(target):
        target.generate(**inputs, **options, assistant=SmartSpecConfig(source, num_nodes=2 * num_layers))
    common = set(source.drafts) & set(expected)
    assert len(common) > 0.7 * len(expected) > 20
    for place in common:
        tree, draft = source.drafts[place], expected[place]
        node = -1
        for token in draft:  # of the best tokens, some may be less likely than others of another branch
            children = np.flatnonzero(tree.parents == node)
            if not len(children):
                break
            assert tree.tokens[children[0]] == token
            node = int(children[0])
        assert node >= 0


@pytest.fixture(scope="module")
def trained(targets):
    target = targets()
    return fitted_mtp(target, target.generate(**prompts(LENGTHS), **GREEDY))


@pytest.fixture(scope="module")
def plain(targets):
    """What plain decoding says, by way and number of prompts."""
    known = {}

    def of(way, lengths):
        if (way, lengths) not in known:
            with hf_smartspec.enabled(targets()):
                known[way, lengths] = targets().generate(**prompts(lengths), **WAYS[way], assistant="none")
        return known[way, lengths]

    return of


ASSISTANTS = {
    "layers": lambda layers: layers,
    "chain": lambda layers: SmartSpecConfig(layers, num_nodes=4),
    "tree": lambda layers: SmartSpecConfig(layers, num_nodes=12, width=3),
    "with suffix trees": lambda layers: ["suffix", layers],
}


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]])
def test_tokens_are_those_of_plain_decoding(targets, trained, plain, name, way, lengths):
    target, inputs, options = targets(), prompts(lengths), WAYS[way]
    with hf_smartspec.enabled(target):
        output = target.generate(**inputs, **options, assistant=ASSISTANTS[name](trained), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(way, lengths))
    assert 0 < output.statistics.accepted_tokens <= output.statistics.drafted_tokens
    if way == "greedy" and lengths is LENGTHS:
        assert output.statistics.accepted_tokens > 0.3 * NUM_TOKENS * len(lengths), "it was taught this"


@pytest.mark.parametrize(("name", "num_layers"), [("deepseek_v3", 1), *exhaustive(("glm4_moe", 3))])
def test_random_layers_change_nothing(targets, name, num_layers):
    target, inputs = targets(name, num_layers), prompts((1, 2, 12))
    for options in (GREEDY, SAMPLED):
        with hf_smartspec.enabled(target):
            expected = target.generate(**inputs, **options, assistant="none")
            output = target.generate(
                **inputs,
                **options,
                assistant=SmartSpecConfig("mtp", num_nodes=9, width=3),
                return_dict_in_generate=True,
            )
        assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > 0


@pytest.mark.parametrize("name", ["qwen3_5_text", *exhaustive(["qwen3_next"], ["qwen3_5_moe_text"])])
def test_hybrids_keep_their_tokens(targets, name):
    """Of one and of four, with layers that know the text of the four."""
    target, four = targets(name), (1, 2, 12, 5)
    layers = fitted_mtp(target, target.generate(**prompts(four), **GREEDY))
    with hf_smartspec.enabled(target):
        for lengths in (four, LENGTHS[:1]):
            for options in (GREEDY, SAMPLED):
                inputs = prompts(lengths)
                expected = target.generate(**inputs, **options, assistant="none")
                tree = SmartSpecConfig(layers, num_nodes=9, width=3)
                output = target.generate(**inputs, **options, assistant=tree, return_dict_in_generate=True)
                assert torch.equal(output.sequences, expected)
                if lengths is four and options is GREEDY:
                    assert output.statistics.accepted_tokens > 0.3 * NUM_TOKENS * len(four), "they were taught this"


@pytest.mark.parametrize("num_layers", [*exhaustive([1]), 3])
def test_drafts_behind_reused_prefixes_are_those_behind_whole_prompts(targets, num_layers):
    """Of an engine's requests, some of which are cancelled, and end with theirs what others may reuse."""
    target = targets(num_layers=num_layers)
    layers = MtpLayers.from_pretrained("mtp", target)
    generator = torch.Generator().manual_seed(5)
    prefix = torch.randint(3, VOCAB_SIZE, (40,), generator=generator).tolist()
    few = GREEDY | {"max_new_tokens": 8}
    texts = [prefix + torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist() for num in (1, 4, 9)]
    sources = []
    for reuses in (True, False):
        source = Spy(layers, num_nodes=6, width=2, reuses=reuses)
        sources.append(source)
        with Engine(target, SmartSpecConfig(source, num_nodes=6), max_batch_size=4) as engine:
            for text in texts:
                dropped = engine.add_request(text[:-1], max_new_tokens=200, eos_token_id=None)
                name = engine.add_request(text, **few)
                engine.cancel_request(dropped)
                output = engine.get_result(name, timeout=TIMEOUT)
                expected = target.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **few)
                assert output.generated_tokens == expected[0, len(text) :].tolist()
            assert engine.statistics.drafted_tokens > NUM_TOKENS
    reusing, whole = sources
    assert reusing.num_reused >= len(prefix) - 1 and whole.num_reused == 0
    common = set(reusing.drafts) & set(whole.drafts)
    assert len(common) >= 8
    assert all(reusing.drafts[place].tokens.tolist() == whole.drafts[place].tokens.tolist() for place in common)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_levels_that_are_sent_at_once_draft_the_same(targets, num_layers, options, monkeypatch):
    """As on devices, where nobody looks at a level before the next one is run."""
    target = targets(num_layers=num_layers)
    layers, drafts = MtpLayers.from_pretrained("mtp", target), []
    for is_free in (True, False):
        monkeypatch.setattr(growing, "waits_are_free", lambda device, is_free=is_free: is_free)
        source = Spy(layers, num_nodes=9, width=3)
        with hf_smartspec.enabled(target):
            target.generate(**prompts(LENGTHS), **options, assistant=SmartSpecConfig(source, num_nodes=9))
        drafts.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in source.drafts.values()])
    assert drafts[0] == drafts[1] and max(len(tokens) for tokens, _ in drafts[0]) == 9


@pytest.mark.parametrize(("name", "num_layers"), [("glm4_moe", 1), ("glm4_moe", 2), ("qwen3_5_text", 1)])
def test_engines_count_the_keys_and_values_of_the_layers(targets, name, num_layers):
    """Two heads of 16 numbers in each; where there are two layers, also the first one's output at each token."""
    layers = MtpLayers.from_pretrained("mtp", targets(name, num_layers))
    numbers = num_layers * 2 * 2 * 16 + (num_layers - 1) * 32
    assert FeatureCandidates(layers).bytes_per_token() == numbers * 4


@torch.no_grad()
def test_rows_hold_the_keys_and_values_of_the_layer(targets):
    """Of a hybrid, with texts of different lengths that come in pieces: those of the layer's own forward."""
    target = targets("qwen3_5_text")
    layers = MtpLayers.from_pretrained("mtp", target)
    forward, texts = FeatureForward(layers), [torch.arange(5, 5 + length) for length in (12, 7)]
    states = [target.base_model(text[None]).last_hidden_state[0] for text in texts]
    rows = [forward.add() for _ in texts]
    for first, last in ((0, 4), (4, 11)):
        pieces = zip(rows, [text[1:][first:last].numpy() for text in texts], [item[first:last] for item in states])
        forward.forward([RowInput(row, feed, features=known[: len(feed)]) for row, feed, known in pieces])
    for row, text, known in zip(rows, texts, states):
        embedded, cache = target.get_input_embeddings()(text[1:])[None], DynamicCache()
        rotary = target.base_model.rotary_emb(embedded, torch.arange(1, len(text))[None])
        layers.blocks[0](embedded, known[None, :-1], rotary, None, None, cache)
        own, lines = forward.cache.layer(0), slice(row.line, row.line + len(text) - 1)
        assert row.length == len(text) - 1
        torch.testing.assert_close(own.keys[lines].transpose(0, 1), cache.layers[0].keys[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.values[lines].transpose(0, 1), cache.layers[0].values[0], atol=1e-5, rtol=1e-5)


def test_they_are_loaded_once_and_fit_their_target(targets):
    target, drafters = targets(), Drafters()
    sources = [resolve(name, target, drafters).source for name in ("mtp", SmartSpecConfig("mtp"), ["mtp"])]
    assert sources[0] is sources[1] is sources[2] and isinstance(sources[0].heads, MtpLayers)
    assert resolve(SmartSpecConfig("mtp", width=3), target, drafters).source.heads is sources[0].heads
    other = new_model("llama", hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    for assistant in (sources[0].heads, sources[0]):
        with pytest.raises(ValueError, match="hidden size 48"):
            resolve(assistant, other)


def test_the_target_stays_as_it_is(targets):
    target = targets()
    target.train()
    before = {name: (item.data_ptr(), item.requires_grad) for name, item in target.named_parameters()}
    layers = MtpLayers.from_pretrained("mtp", target)
    layers.to(torch.bfloat16).eval().requires_grad_(False)
    assert layers.dtype == torch.bfloat16
    assert {name: (item.data_ptr(), item.requires_grad) for name, item in target.named_parameters()} == before
    assert all(module.training for module in target.modules())
    target.eval()


def test_targets_without_layers_are_refused(tmp_path, patch):
    with hf_smartspec.enabled(shared_model("llama")), pytest.raises(ValueError, match="no MTP layers"):
        shared_model("llama").generate(**prompts(LENGTHS), **GREEDY, assistant="mtp")
    write_target("glm4_moe", tmp_path)
    target = load_target(tmp_path, patch)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be read from"):
        MtpLayers.from_pretrained("mtp", target)


@pytest.mark.skipif(not HYBRIDS, reason="recurrent layers of this transformers are not packed")
def test_hybrids_whose_files_hold_no_layer_are_refused(tmp_path, patch):
    write_target("qwen3_5_text", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name: item for name, item in tensors.items() if not name.startswith("mtp.")}
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"cannot be read from .*missing"):
        MtpLayers.from_pretrained("mtp", load_target(tmp_path, patch))
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ValueError, match="no MTP layers"):
        MtpLayers.from_pretrained("mtp", load_target(tmp_path, patch))


@pytest.mark.skipif(not HYBRIDS, reason="recurrent layers of this transformers are not packed")
def test_published_files_of_qwen_hold_parts_for_images_too(tmp_path, patch):
    write_target("qwen3_5_text", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name.replace("model.", "model.language_model."): item for name, item in tensors.items()}
    own["model.visual.patch_embed.proj.bias"] = torch.zeros(16)
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    config = Qwen3_5Config(text_config=text, architectures=["Qwen3_5ForConditionalGeneration"])
    (tmp_path / "config.json").write_text(config.to_json_string())
    layers = MtpLayers.from_pretrained("mtp", AutoModelForCausalLM.from_pretrained(tmp_path))
    block = layers.blocks[0].state_dict()
    assert torch.equal(block["eh_proj.weight"], tensors["mtp.fc.weight"])
    assert torch.equal(block["mtp_block.self_attn.q_proj.weight"], tensors["mtp.layers.0.self_attn.q_proj.weight"])
