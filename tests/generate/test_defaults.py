"""Which assistant a call gets that does not name one: defaults of `enable`, and of generation configs."""

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, pipeline

import hf_smartspec
from hf_smartspec import SmartSpecConfig
from hf_smartspec.prepare.presets import PRESET_NAMES

from .helpers import VOCAB_SIZE, Spy, draft_source, noisy_copy, prompts, tiny_llama

INPUTS = prompts([4, 6])
ARGUMENTS = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture
def spy(model):
    return Spy(draft_source(model))


@pytest.fixture
def everywhere():
    yield hf_smartspec.enable
    hf_smartspec.disable()


def check_speculates(model, spy, **kwargs):
    """The plain tokens, drafted by the spy."""
    with hf_smartspec.enabled():
        expected = model.generate(**INPUTS, **ARGUMENTS, assistant="none")
    drafted, accepted = spy.drafted, spy.accepted
    actual = model.generate(**INPUTS, **ARGUMENTS | kwargs)
    assert torch.equal(actual, expected)
    assert spy.drafted > drafted and spy.accepted > accepted


def check_drafts_nothing(model, spy, inputs=INPUTS, **kwargs):
    """What an untouched model does, without the spy."""
    drafted = spy.drafted
    plain = pickle.loads(pickle.dumps({name: value for name, value in model.state_dict().items()}))
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(plain)
    other.generation_config = copy.deepcopy(model.generation_config)
    torch.manual_seed(0)
    expected = other.generate(**inputs, **ARGUMENTS | kwargs)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**inputs, **ARGUMENTS | kwargs), expected)
    assert spy.drafted == drafted


def test_the_default_of_a_model_is_for_its_calls_only(model, spy):
    assert hf_smartspec.enable(model, assistant=spy) is model
    check_speculates(model, spy)
    hf_smartspec.enable(model)
    check_speculates(model, spy)
    drafted = spy.drafted
    model.generate(**INPUTS, **ARGUMENTS, assistant="none")
    assert spy.drafted == drafted, "the call's own assistant"
    other = Spy(draft_source(model))
    hf_smartspec.enable(model, other)
    check_speculates(model, other)
    with hf_smartspec.enabled(model, spy):
        check_speculates(model, spy)
    check_speculates(model, other)
    hf_smartspec.disable(model)
    hf_smartspec.enable(model)
    check_drafts_nothing(model, other)


def test_the_default_of_all_models(everywhere, model, spy):
    with everywhere(assistant=spy):
        check_speculates(model, spy)
        own = Spy(draft_source(model))
        hf_smartspec.enable(model, own)
        check_speculates(model, own)
        with hf_smartspec.enabled(assistant="none"):
            hf_smartspec.disable(model)
            check_drafts_nothing(model, spy)
        check_speculates(model, spy)
    everywhere()
    check_drafts_nothing(model, spy)


def test_copies_keep_the_default(model, spy):
    hf_smartspec.enable(model, hf_smartspec.SuffixTreeCandidates(max_bytes=2**20))  # which cannot be copied
    copy.deepcopy(model).generate(**INPUTS, **ARGUMENTS)
    hf_smartspec.enable(model, "prompt_lookup")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = other.generate(**INPUTS, **ARGUMENTS, return_dict_in_generate=True)
        assert output.statistics.steps > 0


@pytest.mark.parametrize("where", ["call", "model", "file"])
def test_generation_configs_name_assistants(model, where, tmp_path):
    model.generation_config.eos_token_id = None
    plain = model.generate(**INPUTS, max_new_tokens=40)
    kwargs = {"return_dict_in_generate": True, "max_new_tokens": 40}
    if where == "call":
        kwargs = {"generation_config": GenerationConfig(assistant="prompt_lookup", **kwargs)}
    else:
        model.generation_config.assistant = "prompt_lookup"
    if where == "file":  # of a model that has one: transformers forgets the entries of one made from `model.config`
        model.generation_config._from_model_config = False
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert model.generation_config.assistant == "prompt_lookup"
    hf_smartspec.enable(model)
    output = model.generate(**INPUTS, **kwargs)
    assert torch.equal(output.sequences, plain)
    assert output.statistics.drafted_tokens > 0 and output.statistics.accepted_tokens > 0
    config = kwargs.get("generation_config", model.generation_config)
    assert config.assistant == "prompt_lookup", "configs stay as they are"
    assert model.generate(**INPUTS, **kwargs, assistant="none").statistics.drafted_tokens == 0


def test_the_first_that_says_something_decides(everywhere, model):
    spies = [Spy(draft_source(model)) for _ in range(4)]

    def drafting(**kwargs):
        before = [item.drafted for item in spies]
        model.generate(**INPUTS, **kwargs)
        (drafted,) = [index for index, item in enumerate(spies) if item.drafted > before[index]]
        return drafted

    model.generation_config.max_new_tokens = 6
    everywhere(assistant=spies[0])
    assert drafting() == 0
    hf_smartspec.enable(model, spies[1])
    assert drafting() == 1
    assert drafting(generation_config=GenerationConfig(assistant=spies[2], pad_token_id=0)) == 2
    config = GenerationConfig(assistant=spies[2], pad_token_id=0)
    assert drafting(generation_config=config, assistant=spies[3]) == 3


@pytest.mark.parametrize("where", ["keyword", "call", "model", "enable", "everywhere", "list"])
@pytest.mark.parametrize("value, error", [("nonsense", ValueError), (True, TypeError), (3, TypeError)])
def test_what_is_no_assistant_is_refused_by_naming_all_presets(model, where, value, error):
    hf_smartspec.enable(model)
    with pytest.raises(error) as caught:
        if where == "enable":
            hf_smartspec.enable(model, value)
        elif where == "everywhere":
            hf_smartspec.enable(assistant=value)
        elif where == "call":
            model.generate(**INPUTS, generation_config=GenerationConfig(assistant=value))
        elif where == "model":
            model.generation_config.assistant = value
            model.generate(**INPUTS, max_new_tokens=3)
        else:
            model.generate(**INPUTS, max_new_tokens=3, assistant=value if where == "keyword" else ["suffix", value])
    assert all(name in str(caught.value) for name in PRESET_NAMES)
    assert hf_smartspec.enable.__module__ and not hasattr(type(model).generate, "_smartspec_previous_generate")


# --- What a default gives way to


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 2},
        {"num_beams": 2, "do_sample": True},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
        {"custom_generate": lambda model, input_ids, **kwargs: input_ids},
    ],
)
@pytest.mark.parametrize("where", ["enable", "config", "everywhere"])
def test_defaults_give_way_to_what_the_call_asks_for(everywhere, model, spy, kwargs, where):
    inputs = prompts([6]) if "prompt_lookup_num_tokens" in kwargs else INPUTS
    if where == "enable":
        hf_smartspec.enable(model, spy)
    elif where == "everywhere":
        everywhere(assistant=spy)
    else:
        hf_smartspec.enable(model).generation_config.assistant = "prompt_lookup"
    check_drafts_nothing(model, spy, inputs, **kwargs)
    with pytest.raises(ValueError, match="assistant"):
        model.generate(**inputs, **ARGUMENTS | kwargs, assistant=spy)


def test_a_config_made_from_the_models_own_is_a_default(model, spy):
    """Pipelines and servers change a copy of it."""
    hf_smartspec.enable(model).generation_config.assistant = "prompt_lookup"
    config = copy.deepcopy(model.generation_config)
    config.update(num_beams=2, max_new_tokens=5)
    model.generate(**INPUTS, generation_config=config)
    config = GenerationConfig(assistant="prompt_lookup", num_beams=2, max_new_tokens=5)
    model.generation_config.assistant = None
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(**INPUTS, generation_config=config)


def test_transformers_drafts_have_no_default(everywhere, model, draft, spy, hush):
    """Its assisted decoding calls `generate` of the draft model, with a config made from the target's."""
    inputs = prompts([6])
    plain = model.generate(**inputs, **ARGUMENTS)
    everywhere(assistant=spy)
    assert torch.equal(model.generate(**inputs, **ARGUMENTS, assistant_model=draft), plain)
    hf_smartspec.disable()
    hf_smartspec.enable(draft, spy)
    assert torch.equal(model.generate(**inputs, **ARGUMENTS, assistant_model=draft), plain)
    hf_smartspec.enable(model, spy)
    assert torch.equal(model.generate(**inputs, **ARGUMENTS, assistant_model=draft), plain)
    assert spy.started == 0


def test_a_default_that_cannot_draft_for_a_model_gives_way(everywhere, model, spy):
    other = tiny_llama(vocab_size=VOCAB_SIZE + 8)
    everywhere(assistant=noisy_copy(other))
    check_drafts_nothing(model, spy)
    with pytest.raises(ValueError, match="vocabulary"):
        model.generate(**INPUTS, assistant=noisy_copy(other))
    assert other.generate(**INPUTS, **ARGUMENTS, return_dict_in_generate=True).statistics.accepted_tokens > 0


def test_what_only_turns_out_later_is_decoded_plainly(model, spy, monkeypatch):
    """When transformers has prepared the call, and fed the streamer, it is too late to hand it back."""

    def fails(*args, **kwargs):
        raise ValueError("turned out")

    hf_smartspec.enable(model, spy)
    monkeypatch.setattr("hf_smartspec.prepare.call.check_encoder_arguments", fails)
    check_drafts_nothing(model, spy, do_sample=True)
    with pytest.raises(ValueError, match="turned out"):
        model.generate(**INPUTS, **ARGUMENTS, assistant=spy)


def test_classes_with_a_generate_of_their_own_have_no_default(everywhere, spy):
    class Twice(type(tiny_llama())):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)[:, :-1]

    model = Twice(tiny_llama().config).eval()
    everywhere(assistant=spy)
    check_drafts_nothing(model, spy)
    hf_smartspec.enable(model, spy)
    check_drafts_nothing(model, spy)


def test_seeds_go_with_defaults(model, spy):
    hf_smartspec.enable(model)
    sampling = ARGUMENTS | {"do_sample": True, "seed": 5}
    plain = model.generate(**INPUTS, **sampling)
    hf_smartspec.enable(model, spy)
    assert torch.equal(model.generate(**INPUTS, **sampling), plain) and spy.accepted > 0


def test_seeds_are_never_dropped_for_a_default(model, spy):
    hf_smartspec.enable(model, spy)
    for arguments, message in (({"seed": [1, 2, 3]}, "one per row"), ({"seed": 3, "synced_gpus": True}, "synced_gpus")):
        with pytest.raises(ValueError, match=message):
            model.generate(**INPUTS, **ARGUMENTS, do_sample=True, **arguments)
    assert spy.started == 0


def test_defaults_give_way_where_processes_wait_for_one_another(model, spy, monkeypatch):
    """With ZeRO-3 and FSDP transformers finds out by itself, and needs every process to run every step."""
    hf_smartspec.enable(model, spy)
    monkeypatch.setattr("transformers.generation.utils.is_fsdp_managed_module", lambda module: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *args: 2)
    steps = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: steps.append(args))
    check_drafts_nothing(model, spy)
    assert steps, "in step with the other processes"
    for kwargs in ({"assistant": spy}, {"seed": 3}, {"assistant": spy, "custom_generate": hf_smartspec.decode}):
        if "custom_generate" in kwargs:
            hf_smartspec.disable(model)
        with pytest.raises(ValueError, match="synced_gpus"):
            model.generate(**INPUTS, **ARGUMENTS, **kwargs)


@pytest.mark.parametrize("wrap", [lambda item: item, lambda item: ["suffix", item], SmartSpecConfig])
def test_configs_of_models_hold_names_only(model, draft, wrap, tmp_path):
    """transformers copies them, weights and all, in every call; what cannot be saved would be lost with the model."""
    hf_smartspec.enable(model).generation_config.assistant = wrap(draft)
    with pytest.raises(ValueError, match="enable"):
        model.generate(**INPUTS, max_new_tokens=3)
    model.generation_config.assistant = wrap("prompt_lookup")
    if wrap is SmartSpecConfig:
        with pytest.raises(ValueError, match="SmartSpecConfigs"):
            model.generate(**INPUTS, max_new_tokens=3)
        return
    model.generate(**INPUTS, max_new_tokens=3)
    assert model.smartspec_statistics.num_calls == 1
    model.generation_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["assistant"] == wrap("prompt_lookup")


# --- Draft models by name


def test_a_folder_is_a_draft_model_that_is_loaded_once(model, draft, tmp_path, monkeypatch):
    draft.save_pretrained(tmp_path / "draft")
    name = str(tmp_path / "draft")
    loaded = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    model.generation_config.assistant = name
    hf_smartspec.enable(model)
    plain = model.generate(**INPUTS, **ARGUMENTS, assistant="none")
    for assistant in (None, name, SmartSpecConfig(name, num_nodes=6, width=2), ["suffix", name]):
        output = model.generate(**INPUTS, **ARGUMENTS, assistant=assistant, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert output.statistics.accepted_tokens > 0
    assert len(loaded) == 1
    half = model.to(torch.bfloat16)
    half.generate(**INPUTS, **ARGUMENTS)
    assert len(loaded) == 2, "in the target's dtype"


def test_folders_that_hold_no_model_are_named(model, tmp_path):
    hf_smartspec.enable(model)
    for name, message in (
        (str(tmp_path), "no draft model that can be loaded"),
        ("./nowhere", "the path does not exist"),
        (str(tmp_path / "x"), "the path does not exist"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            model.generate(**INPUTS, assistant=name)
        assert name in str(caught.value)


# --- Clients


def test_pipelines_speculate_by_default(model, tokenizer, spy, deprecated_by_itself):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    arguments = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    plain = pipe(["abab", "cdcdcd"], **arguments)
    assert hf_smartspec.enable(pipe, spy) is pipe
    assert pipe(["abab", "cdcdcd"], **arguments) == plain
    assert spy.accepted > 0
    assert isinstance(pipe.model, PreTrainedModel)
    hf_smartspec.disable(pipe)
    assert "generate" not in vars(model)
