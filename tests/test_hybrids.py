"""Models with recurrent layers through every door: transformers' batching, the server, commands, copies, drafts."""

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_smartspec
from hf_smartspec import DraftModelCandidates, Engine
from hf_smartspec.serving.transformers_batching.manager import SpeculativeBatchingManager
from hf_smartspec.target_model.compat import CACHE

from .cases import left_padded, prompts_of
from .commands.helpers import EMBEDDED, call
from .covering import exhaustive, part_of
from .generate.helpers import EOS, PAD, Spy, set_special_tokens
from .models import DEVICE, RECURRENT, UNPADDED, new_model, noisy_model, with_noise
from .serving.helpers import TIMEOUT

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")
PROMPTS = prompts_of([5, 9, 3, 12])
INPUTS = left_padded(PROMPTS)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20}


def some_of(*kept):
    """All kinds, as parameters; `make test` runs those to be kept."""
    return part_of(list(RECURRENT), *[name for name in kept if name in RECURRENT])


def model_of(architecture, **changes):
    return hf_smartspec.enable(set_special_tokens(new_model(architecture, **changes), EOS))


def generated(model, settings=GREEDY, **options):
    texts = model.generate(**INPUTS, **settings, **options)[:, INPUTS["input_ids"].shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in texts]


def tokens(found):
    assert all(output.error is None for output in found.values())
    return [output.generated_tokens for output in found.values()]


@pytest.mark.parametrize("architecture", some_of("mamba2"))
def test_generate_batch_which_transformers_refuses(architecture):
    model, config = model_of(architecture), GenerationConfig(**GREEDY)
    with pytest.raises(ValueError, match=r"Invalid layer type|stateful"):
        model.generate_batch(PROMPTS, config)
    expected = generated(model, assistant="none")
    spy = Spy(DraftModelCandidates(with_noise(copy.deepcopy(model))))
    assert tokens(model.generate_batch(PROMPTS, config, assistant=spy)) == expected
    assert spy.accepted > 0
    sampled = model.generate_batch(PROMPTS, GenerationConfig(**SAMPLED), seed=7, assistant="suffix")
    assert tokens(sampled) == generated(model, SAMPLED, seed=7)
    hf_smartspec.enable(model, assistant="auto")  # a default serves them, too
    assert isinstance(model.init_continuous_batching(config), SpeculativeBatchingManager)
    assert tokens(model.generate_batch(PROMPTS, config)) == expected


@pytest.mark.parametrize("architecture", UNPADDED)
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_models_whose_texts_padding_changes_are_packed_without_it(architecture, settings):
    model = model_of(architecture)
    spy, inputs = Spy(DraftModelCandidates(with_noise(copy.deepcopy(model)))), left_padded(prompts_of([6, 6, 6]))
    expected = model.generate(**inputs, **settings, seed=5, assistant="none")
    assert torch.equal(model.generate(**inputs, **settings, seed=5, assistant=spy), expected)
    drafted = spy.drafted
    assert spy.accepted > 0
    caches = [
        model.generate(**inputs, **settings, seed=5, assistant=assistant, return_dict_in_generate=True)[CACHE]
        for assistant in ("suffix", "none")
    ]
    assert type(caches[0]) is type(caches[1])
    if DEVICE.type == "cuda" and architecture == "minimax":
        pytest.skip("transformers' forward of padded rows fails there: the mask's last dimension is not contiguous")
    ragged = model.generate(**INPUTS, **settings, seed=5, assistant="none")
    assert torch.equal(model.generate(**INPUTS, **settings, seed=5, assistant=spy), ragged)
    assert spy.drafted == drafted, "decoded without speculation"


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("mamba2", "llama"),
        ("lfm2", "mamba2"),
        *exhaustive(("llama", "kimi_linear"), ("bamba", "qwen3_next"), ("bloom", "lfm2")),
    ],
)
@pytest.mark.parametrize("with_suffix", [True, False])
def test_draft_models_of_other_kinds(target, draft, with_suffix):
    """A plain model drafts for a hybrid, a hybrid for another kind and for models that run row by row."""
    model, small = model_of(target), noisy_model(draft)
    assistant = ["suffix", small] if with_suffix else small
    expected = generated(model, assistant="none")
    assert generated(model, assistant=assistant) == expected
    assert model.smartspec_statistics.last.drafted_tokens > 0
    assert generated(model, SAMPLED, assistant=assistant, seed=3) == generated(model, SAMPLED, seed=3)
    with Engine(model, assistant=assistant, max_batch_size=3) as engine:
        names = [engine.add_request(prompt, **GREEDY) for prompt in PROMPTS]
        assert [engine.get_result(name, TIMEOUT).generated_tokens for name in names] == expected


def loaded(model, folder):
    model.save_pretrained(folder)
    return hf_smartspec.enable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


COPIES = {
    "copy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "folder": loaded,
}


@pytest.mark.parametrize("way", part_of(COPIES, "folder"))
@pytest.mark.parametrize("architecture", some_of("lfm2"))
def test_copies_of_models_that_have_run_draft(architecture, way, tmp_path):
    model = model_of(architecture)
    expected = generated(model, assistant="suffix")
    other = COPIES[way](model, tmp_path)
    assert generated(other, assistant=noisy_model(architecture)) == expected
    assert other.smartspec_statistics.last.accepted_tokens > 0


@pytest.mark.exhaustive
def test_compiled_models_draft():
    model = model_of("lfm2")
    expected = generated(model, assistant="suffix")
    model.compile(backend="eager")
    assert hf_smartspec.enable(torch.compile(model, backend="eager")) is not model
    assert generated(model, assistant=noisy_model("lfm2")) == expected
    assert model.smartspec_statistics.last.accepted_tokens > 0


# --- Folders


@pytest.fixture(scope="module", params=some_of("lfm2"))
def folder(request, tmp_path_factory):
    """`target` and `draft`, with the tokenizer of the embedded models."""
    folder, tokenizer = tmp_path_factory.mktemp("hybrids"), AutoTokenizer.from_pretrained(EMBEDDED)
    model = new_model(request.param, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    for name, own in (("target", model), ("draft", with_noise(copy.deepcopy(model)))):
        own.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


SHORT = ["--max-new-tokens", "8", "--threads", "1", "--device", "cpu"]


@pytest.mark.exhaustive
def test_commands_verify(folder, capsys):
    drafts = ["--assistant", f"suffix+{folder / 'draft'}"]
    few = ["--num-prompts", "2", "--batch-sizes", "2", "--samples", "0", *SHORT]
    assert call("verify", folder / "target", *drafts, *few) == 0


def test_commands_generate(folder, capsys):
    texts = set()
    for assistant in ("none", "auto", folder / "draft"):
        drafts = ["--assistant", assistant, "--stats"]
        assert call("generate", "a b a b", "cd", "--model", folder / "target", *drafts, *SHORT) == 0
        captured = capsys.readouterr()
        texts.add(captured.out)
    assert len(texts) == 1 and " 0 accepted" not in captured.err


def test_commands_bench_generate(folder, tmp_path, capsys, deprecated_by_itself):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.json"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} and {n} and"}) + "\n" for n in range(2)))
    drafts = ["--assistant", "suffix", folder / "draft", "--batch-size", "2", "--dtype", "float32"]
    assert call("bench", "generate", prompts, "--model", folder / "target", *drafts, *SHORT, "--json", results) == 0
    rows = json.loads(results.read_text())["results"]
    assert len({row["method"] for row in rows}) >= 3


def test_the_server_streams_and_cancels(folder):
    pytest.importorskip("fastapi")
    from .serving.server.running import Served, check_nothing_is_left, check_serves, running

    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    served = Served(model, AutoTokenizer.from_pretrained(folder / "target"))
    expected = served.text(served.alone("a b a b", max_new_tokens=16))
    with running(served, assistant=["suffix", str(folder / "draft")]) as server:
        client, asked = server.client(), {"model": "demo", "prompt": "a b a b", "max_tokens": 16, "temperature": 0}
        answer = client.completions.create(**asked)
        assert answer.choices[0].text == expected
        counts = answer.model_extra["metrics"]["speculative_decoding"]
        parts = client.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].text for part in parts) == expected
        with client.completions.create(**asked | {"max_tokens": 900}, stream=True) as stream:
            next(iter(stream))
        check_nothing_is_left(server)
        check_serves(server, served)
    assert counts["num_accepted_draft_tokens"] > 0
