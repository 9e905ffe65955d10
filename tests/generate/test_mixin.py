"""
What transformers' own `GenerationTesterMixin` asserts of `generate`, with every call routed through an assistant:
shapes, counts and types of everything that is returned, and going on from returned caches.
"""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, StoppingCriteria

import hf_smartspec

from .helpers import BOS, EOS, PAD, VOCAB_SIZE, Oracle, Spy, prompts, set_special_tokens, tiny_llama

TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
WINDOW = 6
NEW = 7  # tokens per call
BATCH = prompts([9, 9], seed=2)
EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}


def gemma3():
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **TOKENS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.3,
            attn_implementation="eager",
        )
    )


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            **TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3, tie_word_embeddings=False
        )
    )


def t5():
    model = T5ForConditionalGeneration(
        T5Config(
            **TOKENS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=PAD,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.generation_config.decoder_start_token_id = PAD
    return model


def bloom():
    return BloomForCausalLM(BloomConfig(**TOKENS, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3))


def mamba():
    return MambaForCausalLM(
        MambaConfig(**TOKENS, hidden_size=32, state_size=8, num_hidden_layers=2, tie_word_embeddings=False)
    )


MODELS = {"llama": tiny_llama, "gemma3": gemma3, "gpt2": gpt2, "bloom": bloom, "t5": t5, "mamba": mamba}
CACHED = [name for name in MODELS if name != "mamba"]


def build(name, implementation=None):
    torch.manual_seed(0)
    model = set_special_tokens(MODELS[name]().eval(), eos=None)
    if name in ("t5", "mamba"):  # as initialised, they say the same token again and again
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if parameter.dim() > 1 and "A_log" not in path:
                    parameter.normal_(0, 0.3)
    if implementation is not None and name != "mamba":
        model.set_attn_implementation(implementation)
    return model


@pytest.fixture(params=MODELS)
def model(request):
    """Never ends a row early, as in the mixin's tests."""
    return build(request.param)


@pytest.fixture
def routed(model):
    """`generate` with an assistant that knows what is to come; checks that it was of use."""

    def generate(model=model, drafts=model.config.model_type != "mamba", **kwargs):
        reference = model.generate(**kwargs | {"return_dict_in_generate": False})
        mask = None if model.config.is_encoder_decoder else kwargs.get("attention_mask")
        spy = Spy(Oracle(reference, mask))
        with hf_smartspec.enabled():
            output = model.generate(**kwargs, assistant=spy)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        assert torch.equal(sequences, reference)
        assert (spy.drafted > 0) == (spy.accepted > 0) == drafts
        return output

    return generate


def prompt_length(model, inputs):
    return 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def check_steps(name, steps, num_rows, num_steps=NEW):
    assert isinstance(steps, tuple), name
    assert [tuple(step.shape) for step in steps] == [(num_rows, VOCAB_SIZE)] * num_steps, name


def check_layers(name, steps, expected):
    """`expected` yields the shape of every layer at a step."""
    assert isinstance(steps, tuple) and len(steps) == NEW, name
    for index, step in enumerate(steps):
        assert isinstance(step, tuple), name
        assert [tuple(layer.shape) for layer in step] == expected(index), (name, index)


def test_greedy(model, routed):
    output = routed(**BATCH, max_new_tokens=NEW)
    assert output.shape == (2, prompt_length(model, BATCH) + NEW)


def test_sample(model):
    with hf_smartspec.enabled():
        for num_return_sequences in (1, 3):
            kwargs = {
                "do_sample": True,
                "num_return_sequences": num_return_sequences,
                "max_new_tokens": NEW,
                "top_k": 5,
            }
            output = model.generate(**BATCH, **kwargs, seed=1, assistant="prompt_lookup")
            assert output.shape == (2 * num_return_sequences, prompt_length(model, BATCH) + NEW)
            assert torch.equal(output, model.generate(**BATCH, **kwargs, seed=1, assistant="none"))


@pytest.mark.parametrize("num_return_sequences", [1, 2])
def test_dict_output(model, routed, num_return_sequences):
    kwargs = {"do_sample": num_return_sequences > 1, "num_return_sequences": num_return_sequences}
    num_rows = 2 * num_return_sequences
    kwargs |= {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    if num_return_sequences == 1:
        output = routed(**BATCH, **kwargs)
    else:
        with hf_smartspec.enabled():
            output = model.generate(**BATCH, **kwargs, assistant="prompt_lookup")
    is_encoder_decoder = model.config.is_encoder_decoder
    assert isinstance(output, GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput)
    assert output.sequences.shape == (num_rows, prompt_length(model, BATCH) + NEW)
    check_steps("scores", output.scores, num_rows)
    check_steps("logits", output.logits, num_rows)
    assert output.statistics.generated_tokens == num_rows * NEW


@pytest.mark.parametrize("name", CACHED)
def test_attentions_and_hidden_states_are_served_plainly(name):
    model = build(name, "eager")
    kwargs = BATCH | EVERYTHING | {"max_new_tokens": NEW, "return_dict_in_generate": True}
    expected = model.generate(**kwargs)
    with hf_smartspec.enabled():
        output = model.generate(**kwargs, assistant="prompt_lookup")
    assert torch.equal(output.sequences, expected.sequences)
    check_steps("scores", output.scores, 2)
    check_steps("logits", output.logits, 2)
    config = model.config
    num_layers, num_heads, hidden_size = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    length = prompt_length(model, BATCH)

    def hidden_states(step):
        return [(2, length if step == 0 else 1, hidden_size)] * (num_layers + 1)

    def attentions(step):
        shapes = []
        for layer in range(num_layers):
            keys = length + step
            if name == "gemma3" and config.layer_types[layer] == "sliding_attention" and step:
                keys = min(keys, WINDOW)
            shapes.append((2, num_heads, length if step == 0 else 1, keys))
        return shapes

    if config.is_encoder_decoder:
        check_layers("decoder_hidden_states", output.decoder_hidden_states, hidden_states)
        check_layers("decoder_attentions", output.decoder_attentions, attentions)
        cross = lambda step: [(2, num_heads, 1, 9)] * num_layers  # noqa: E731
        check_layers("cross_attentions", output.cross_attentions, cross)
        assert [tuple(item.shape) for item in output.encoder_hidden_states] == [(2, 9, hidden_size)] * (num_layers + 1)
        assert [tuple(item.shape) for item in output.encoder_attentions] == [(2, num_heads, 9, 9)] * num_layers
    else:
        check_layers("hidden_states", output.hidden_states, hidden_states)
        check_layers("attentions", output.attentions, attentions)


@pytest.mark.parametrize("model", ["llama", "gemma3", "gpt2", "mamba"], indirect=True)
def test_without_input_ids(model, routed):
    output = routed(max_new_tokens=NEW)
    assert output.shape == (1, 1 + NEW)
    assert output[0, 0] == BOS


@pytest.mark.parametrize("model", CACHED, indirect=True)  # a padded state-space model differs from an unpadded one
def test_left_padding(model, routed):
    padded = prompts([5, 9], seed=2)
    output = routed(**padded, max_new_tokens=NEW)
    alone = routed(
        input_ids=padded["input_ids"][:1, 4:], attention_mask=padded["attention_mask"][:1, 4:], max_new_tokens=NEW
    )
    assert output[0, -NEW:].tolist() == alone[0, -NEW:].tolist()


@pytest.mark.parametrize("name", CACHED)
def test_cache_shapes(name):
    model = build(name)
    kwargs = BATCH | {"max_new_tokens": NEW, "return_dict_in_generate": True}
    expected = model.generate(**kwargs).past_key_values
    with hf_smartspec.enabled():
        cache = model.generate(**kwargs, assistant="prompt_lookup").past_key_values
    assert type(cache) is type(expected) is (EncoderDecoderCache if name == "t5" else DynamicCache)
    length = prompt_length(model, BATCH) + NEW - 1
    assert cache.get_seq_length() == expected.get_seq_length() == length
    pairs = [(cache, expected)]
    if name == "t5":
        pairs = [
            (cache.self_attention_cache, expected.self_attention_cache),
            (cache.cross_attention_cache, expected.cross_attention_cache),
        ]
    for actual, wanted in pairs:
        for ours, plain in zip(actual.layers, wanted.layers, strict=True):
            assert type(ours) is type(plain)
            for states, reference in ((ours.keys, plain.keys), (ours.values, plain.values)):
                torch.testing.assert_close(states, reference, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("lengths", [[9, 9], [5, 9]], ids=["full", "padded"])
@pytest.mark.parametrize("pattern", ["ours,ours,ours", "plain,ours,plain", "ours,plain,ours"])
def test_continue_from_past_key_values(name, lengths, pattern):
    model = build(name)
    batch = prompts(lengths, seed=2)
    whole = model.generate(**batch, max_new_tokens=3 * NEW, return_dict_in_generate=True)
    inputs, accepted = dict(batch), []
    with hf_smartspec.enabled():
        for kind in pattern.split(","):
            spy = Spy(Oracle(whole.sequences, None if name == "t5" else batch["attention_mask"]))
            kwargs = {"assistant": spy} if kind == "ours" else {}
            output = model.generate(**inputs, max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
            accepted.append(spy.accepted)
            inputs["past_key_values"] = output.past_key_values
            if name == "t5":
                inputs["decoder_input_ids"] = output.sequences
                inputs["decoder_attention_mask"] = torch.ones_like(output.sequences)
            else:
                inputs["input_ids"] = output.sequences
                missing = output.sequences.shape[1] - batch["attention_mask"].shape[1]
                inputs["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, missing), value=1)
    assert torch.equal(output.sequences, whole.sequences)
    for index, kind in enumerate(pattern.split(",")):
        # given caches of models that are not packed are continued plainly
        assert (accepted[index] > 0) == (kind == "ours" and (name not in ("t5", "bloom") or index == 0))
    assert output.past_key_values.get_seq_length() == whole.past_key_values.get_seq_length()


@pytest.mark.parametrize("name", CACHED)
def test_rows_that_end_early(name):
    """Finished rows are padded, and their scores and cache are those of plain decoding, which feeds the padding."""
    model = build(name)
    whole = model.generate(**BATCH, max_new_tokens=3 * NEW)
    start = prompt_length(model, BATCH)
    set_special_tokens(model, eos=[int(whole[0, start + 4]), int(whole[1, start + 11])])
    kwargs = BATCH | {"max_new_tokens": 3 * NEW, "return_dict_in_generate": True}
    mask = None if name == "t5" else BATCH["attention_mask"]
    for extra in ({}, {"output_scores": True, "output_logits": True}):
        plain = model.generate(**kwargs, **extra)
        spy = Spy(Oracle(plain.sequences, mask))
        with hf_smartspec.enabled():
            output = model.generate(**kwargs, **extra, assistant=spy)
        assert spy.accepted > 0
        assert torch.equal(output.sequences, plain.sequences)
        assert (output.sequences[:, -1] == PAD).any()
        for field in extra:
            for ours, theirs in zip(getattr(output, field[7:]), getattr(plain, field[7:]), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        ours, theirs = output.past_key_values, plain.past_key_values
        if name == "t5":
            ours, theirs = ours.self_attention_cache, theirs.self_attention_cache
        for layer, reference in zip(ours.layers, theirs.layers, strict=True):
            torch.testing.assert_close(layer.keys, reference.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_masks_with_holes(name):
    """Sliding windows count columns in plain decoding, holes included."""
    model = build(name)
    batch = prompts([20, 20], seed=4)
    batch["attention_mask"][0, [3, 8, 9, 14, 17]] = 0
    batch["attention_mask"][1, [0, 1, 16, 18]] = 0
    kwargs = batch | {"max_new_tokens": NEW}
    expected = model.generate(**kwargs)
    plain = model.generate(**kwargs, return_dict_in_generate=True)
    for num_rows in (2, 1):
        spy = Spy(Oracle(expected, batch["attention_mask"]))
        rows = {name: value[:num_rows] for name, value in batch.items()}
        with hf_smartspec.enabled():
            output = model.generate(**rows, max_new_tokens=NEW, return_dict_in_generate=True, assistant=spy)
        assert torch.equal(output.sequences, expected[:num_rows])
        assert spy.accepted > 0
        layers = zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True)
        for index, (ours, theirs) in enumerate(layers):
            assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
            columns = torch.nn.functional.pad(rows["attention_mask"], (0, NEW - 1), value=1).bool()
            columns = columns[:, -ours.keys.shape[2] :]
            for name in ("keys", "values"):
                states, reference = getattr(ours, name), getattr(theirs, name)[:num_rows]
                pair = (item.transpose(1, 2)[columns] for item in (states, reference))
                torch.testing.assert_close(*pair, atol=5e-5, rtol=1e-4, msg=f"{name} of layer {index}")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "mamba"])
def test_masks_of_nothing(name):
    """The mixin's masks of mamba hold zeros only."""
    model, kwargs = build(name), BATCH | {"attention_mask": torch.zeros_like(BATCH["attention_mask"])}
    for extra in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        expected = model.generate(**kwargs, **extra, max_new_tokens=NEW)
        with hf_smartspec.enabled():
            output = model.generate(**kwargs, **extra, max_new_tokens=NEW, assistant="auto")
        sequences = [item.sequences if extra else item for item in (output, expected)]
        assert torch.equal(*sequences)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_position_ids_do_not_matter_where_they_are_the_default(name):
    model = build(name)
    positions = (BATCH["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with hf_smartspec.enabled():
        kwargs = BATCH | {"max_new_tokens": NEW, "assistant": "prompt_lookup"}
        assert torch.equal(model.generate(**kwargs), model.generate(**kwargs, position_ids=positions))


@pytest.mark.parametrize("name", ["t5"])
def test_encoder_decoder_inputs(name):
    model = build(name)
    start = torch.tensor([[PAD, 5, 6], [PAD, 7, 8]])
    encoder_outputs = model.get_encoder()(**BATCH)
    for kwargs in (
        BATCH | {"decoder_input_ids": start},
        BATCH | {"decoder_input_ids": start, "decoder_attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
        {"encoder_outputs": encoder_outputs, "attention_mask": BATCH["attention_mask"]},
        {"inputs": BATCH["input_ids"]},
    ):
        expected = model.generate(**kwargs, max_new_tokens=NEW)
        spy = Spy(Oracle(expected))
        with hf_smartspec.enabled():
            assert torch.equal(model.generate(**kwargs, max_new_tokens=NEW, assistant=spy), expected)
        assert spy.accepted > 0


def test_criteria_and_processors_of_the_user(model):
    """Whichever way a model is served, they see what plain decoding shows them."""

    def make():
        log = []

        def processor(ids, scores):
            log.append(("processor", ids.tolist()))
            return scores

        class Criterion(torch.nn.Identity):
            def __call__(self, ids, scores, **kwargs):
                log.append(("criterion", ids.tolist()))
                return torch.full((len(ids),), len(log) >= 10)

        return log, {"logits_processor": [processor], "stopping_criteria": [Criterion()], "max_new_tokens": NEW}

    plain_log, kwargs = make()
    expected = model.generate(**BATCH, **kwargs)
    log, kwargs = make()
    mask = None if model.config.is_encoder_decoder else BATCH["attention_mask"]
    with hf_smartspec.enabled():
        output = model.generate(**BATCH, **kwargs, assistant=Oracle(expected, mask))
    assert torch.equal(output, expected)
    assert log == plain_log and len(log) == 10


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("eos", [EOS, None], ids=["eos", "no_eos"])
def test_the_cache_of_rows_that_ran_ahead_of_a_criterion(name, eos):
    """They have to be taken back, sliding windows included."""

    class Ends(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] - start >= torch.tensor([12, 7])

    model = build(name)
    start = prompt_length(model, BATCH)
    whole = model.generate(**BATCH, max_new_tokens=20)
    set_special_tokens(model, eos)
    settings = BATCH | {"max_new_tokens": 20, "stopping_criteria": [Ends()], "return_dict_in_generate": True}
    plain = model.generate(**settings)
    source = Oracle(whole, None if name == "t5" else BATCH["attention_mask"])
    source.default_num_nodes = 15
    spy = Spy(source)
    with hf_smartspec.enabled():
        output = model.generate(**settings, assistant=spy)
    assert spy.accepted > 0
    assert torch.equal(output.sequences, plain.sequences)
    ours, theirs = output.past_key_values, plain.past_key_values
    if name == "t5":
        ours, theirs = ours.self_attention_cache, theirs.self_attention_cache
    for layer, reference in zip(ours.layers, theirs.layers, strict=True):
        assert layer.get_seq_length() == reference.get_seq_length()
        torch.testing.assert_close(layer.keys, reference.keys, atol=1e-4, rtol=1e-4)


def test_tokens_that_are_no_tokens(model, routed):
    """The mixin switches EOS off by an id that never comes."""
    model.generation_config.update(eos_token_id=-1, pad_token_id=-1)
    with torch.no_grad():
        routed(**BATCH, max_new_tokens=NEW)


def test_the_model_is_left_as_it_was(model):
    before = (model.config.to_dict(), model.config._attn_implementation, vars(model.generation_config).copy())
    with hf_smartspec.enabled():
        model.generate(**BATCH, max_new_tokens=NEW, assistant="prompt_lookup")
    assert before == (model.config.to_dict(), model.config._attn_implementation, vars(model.generation_config))
