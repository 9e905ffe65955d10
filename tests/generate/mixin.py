"""The models of the tests that follow transformers' `GenerationTesterMixin`, and what these check."""

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

import hf_smartspec

from ..models import RECURRENT
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


def routing(model):
    """`generate` with an assistant that knows what is to come; checks that it was of use."""

    def generate(model=model, drafts=model.config.model_type != "mamba" or bool(RECURRENT), **kwargs):
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
