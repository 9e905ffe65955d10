"""
Grammars: llguidance as a logits processor, with state, in `generate` and in an `Engine`: JSON of a schema.

    pip install llguidance
    python demos/examples/grammar.py
"""

import json
from pathlib import Path
from typing import Any

import llguidance.hf
import llguidance.torch
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

import hf_smartspec

MODEL = Path(__file__).resolve().parents[1] / "models/target"
QUESTIONS = ["What is 12 times 4?", "Which planet is the largest?", "Who are you?"]
ANSWER = {"answer": {"type": "string", "maxLength": 24}, "sure": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": ANSWER, "required": list(ANSWER), "additionalProperties": False}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


class GrammarProcessor(LogitsProcessor):
    """Leaves only tokens that the grammar allows. One object for one call of `generate`: it remembers every row."""

    def __init__(self, vocabulary: Any):
        self.vocabulary = vocabulary
        self.matchers: list[LLMatcher] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not self.matchers:
            self.matchers = [LLMatcher(self.vocabulary, GRAMMAR) for _ in scores]
        else:
            for matcher, token in zip(self.matchers, input_ids[:, -1].tolist()):
                matcher.is_stopped() or matcher.consume_token(token)
        mask = llguidance.torch.allocate_token_bitmask(len(scores), self.vocabulary.vocab_size)
        for row, matcher in enumerate(self.matchers):
            llguidance.torch.fill_next_token_bitmask(matcher, mask, row)
        llguidance.torch.apply_token_bitmask_inplace(scores, mask.to(scores.device))
        return scores


def main() -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=model.config.vocab_size)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )

    def ask() -> list[str]:
        outputs = model.generate(**inputs, max_new_tokens=40, logits_processor=[GrammarProcessor(vocabulary)])
        return tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    plain = ask()
    hf_smartspec.enable(model, assistant="auto")  # the line
    fast = ask()
    with hf_smartspec.Engine(model, assistant="auto", tokenizer=tokenizer) as engine:
        one = {"max_new_tokens": 40}
        names = [engine.add_request(chat, **one, logits_processor=[GrammarProcessor(vocabulary)]) for chat in chats]
        outputs: list[Any] = [engine.get_result(name) for name in names]
        served = tokenizer.batch_decode([item.generated_tokens for item in outputs], skip_special_tokens=True)

    statistics = model.smartspec_statistics.total + engine.statistics
    print(json.loads(fast[0]))
    print(f"The same without speculation: {plain == fast} by `generate`, {plain == served} by an engine.")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return [plain, plain], [fast, served], statistics


if __name__ == "__main__":
    main()
