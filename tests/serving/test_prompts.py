"""Prompts as text and as chats, for engines with a tokenizer; without one, the error says what to do."""

import numpy as np
import pytest
import torch

from hf_smartspec import Engine

from ..folders import byte_tokenizer
from ..generate.helpers import set_special_tokens, tiny_tokenizer
from ..generate.helpers import tiny_llama as llama
from .helpers import Asked

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
CHAT = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi there"}]
NEW = {"max_new_tokens": 12}


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def model(tokenizer):
    return set_special_tokens(llama(vocab_size=len(tokenizer)), eos=None)


def ids(tokenizer, text):
    return tokenizer(text).input_ids


def test_text_and_chats_are_what_the_tokenizer_makes_of_them(model, tokenizer):
    prompts = ["once upon a time", CHAT, ids(tokenizer, "and ids")]
    texts = ["once upon a time", "<system>short<user>hi there<bot>", "and ids"]
    with Engine(model, "prompt_lookup", tokenizer=tokenizer) as engine:
        outputs = engine.generate(prompts, **NEW)
        outputs += [engine.get_result(name) for name in engine.add_requests(prompts, **NEW)]
    for output, text in zip(outputs, 2 * texts, strict=True):
        assert output.prompt_ids == ids(tokenizer, text)
        assert output.generated_tokens == Asked(ids(tokenizer, text), NEW).alone(model)
    assert engine.statistics.drafted_tokens > 0


def test_stop_strings_use_the_engines_tokenizer():
    tokenizer, model = tiny_tokenizer(), set_special_tokens(llama(), eos=None)
    alone = Asked(ids(tokenizer, "stophere"), NEW).alone(model)
    stop = tokenizer.decode(alone[6])
    expected = alone[: 1 + next(i for i, token in enumerate(alone) if stop in tokenizer.decode(token))]
    with Engine(model, "prompt_lookup", tokenizer=tokenizer) as engine:
        (output,) = engine.generate(["stophere"], stop_strings=[stop], **NEW)
    assert output.generated_tokens == expected and output.finish_reason == "stop" and len(expected) < len(alone)


@pytest.mark.parametrize("prompt", ["text", CHAT])
def test_without_a_tokenizer_the_error_names_the_remedy(model, prompt):
    engine = Engine(model, "none")
    with pytest.raises(TypeError, match=r"needs a tokenizer: `Engine\(model, tokenizer=\.\.\.\)`"):
        engine.add_request(prompt)
    with pytest.raises(TypeError, match=r"`tokenizer\(text\)\.input_ids`"):
        engine.generate([prompt])


def test_single_prompts_in_place_of_lists_are_refused(model, tokenizer):
    engine = Engine(model, "none", tokenizer=tokenizer)
    for method in (engine.generate, engine.add_requests):
        for prompt in ("text", CHAT, CHAT[0]):
            with pytest.raises(TypeError, match="must be a list, got a single one"):
                method(prompt)
    with pytest.raises(TypeError, match="got one message: put it in a list"):
        engine.add_request(CHAT[0])
    with pytest.raises(TypeError, match="got an encoding: pass its `input_ids`"):
        engine.add_request(tokenizer("text"))


def test_chats_that_cannot_be_written_down(model, tokenizer):
    engine = Engine(model, "none", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="Messages of a chat must be"):
        engine.add_request([{"content": "who says that?"}])
    tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(ValueError, match="The chat template refuses the messages: Roles must alternate"):
        engine.add_request(CHAT)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        engine.add_request(CHAT)
    with pytest.raises(TypeError, match=r"`tokenizer` must be a tokenizer of transformers, got str"):
        Engine(model, "none", tokenizer="gpt2")


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], ValueError, "of at least one token; got an empty one"),
        ([[]], ValueError, "of at least one token; got an empty one"),
        ("", ValueError, "of at least one token; got '', for which the tokenizer returns none"),
        ([[3], [4]], ValueError, r"of one prompt, got shape \[2, 1\].*`add_requests`"),
        (3, ValueError, r"of one prompt, got shape \[\]"),
        (None, TypeError, "of one prompt, got NoneType"),
        (["a", "b"], TypeError, "of one prompt, got list"),
        ([2**70], TypeError, "of one prompt, got list"),
        ([3.0, 4.0], TypeError, r"which are integers; got torch\.float32"),
        (np.ones(3), TypeError, r"which are integers; got torch\.float64"),
        ([True, False], TypeError, r"which are integers; got torch\.bool"),
        (torch.ones(3, dtype=torch.complex64), TypeError, r"which are integers; got torch\.complex64"),
    ],
)
def test_what_is_no_prompt_is_refused_while_others_run(model, tokenizer, prompt, error, match):
    other = ids(tokenizer, "once upon a time")
    with Engine(model, "prompt_lookup", tokenizer=tokenizer) as engine:
        name = engine.add_request(other, **NEW)
        with pytest.raises(error, match=match):
            engine.add_request(prompt, **NEW)
        with pytest.raises(error, match=match):
            engine.generate([other, prompt], **NEW)
        output = engine.get_result(name)
    assert output.generated_tokens == Asked(other, NEW).alone(model)
