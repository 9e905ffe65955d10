"""The byte-level BPE tokenizer with its chat template."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import Example

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"

# Any other role (system, tool) is shown to the model as text from the user: it knows only two.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{END}"
    f"{{% else %}}{USER}{{{{ message['content'] }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary of at most `vocab_size` entries. Digits stay single: it helps arithmetic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


class Encoded(NamedTuple):
    """Token ids of a conversation; tokens before `learn_from` are context only, the response starts at
    `response_from`."""

    ids: np.ndarray  # uint16 [length]
    learn_from: int
    response_from: int


def encode(example: Example, tokenizer: PreTrainedTokenizerFast, max_length: int) -> Encoded | None:
    """Tokens as the chat template renders them, cut at `max_length`; None if the prompt leaves no room.

    Earlier turns are dropped first, oldest pair first, then the end of the response.
    """
    user_id, assistant_id, end_id = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])
    pieces = []
    for role, content in example.messages:
        ids = tokenizer(content, add_special_tokens=False, verbose=False).input_ids
        pieces.append([assistant_id, *ids, end_id] if role == "assistant" else [user_id, *ids])
    # The assistant mark belongs to the prompt: it is never predicted.
    prompt_len = sum(map(len, pieces[:-1])) + 1
    while prompt_len > max_length * 3 // 4:
        if len(pieces) <= 2:
            return None
        prompt_len -= sum(map(len, pieces[:2]))
        pieces = pieces[2:]
    ids = np.array([token for piece in pieces for token in piece][:max_length], dtype=np.uint16)
    last_prompt_from = prompt_len - 1 - len(pieces[-2]) + 1
    return Encoded(ids, last_prompt_from if example.learn_prompt else prompt_len, prompt_len)
