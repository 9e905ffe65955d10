"""Forms of answers: JSON, a schema, a regular expression, a choice, a grammar."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ..errors import ApiError

_ANY_OBJECT = {"type": "object"}
_FORMS = "json, regex, choice or grammar"
LAYOUT: Any = {"whitespace_pattern": r"[ \n]?"}  # without it, small models may write blanks without end
# A lexer's work while it is compiled: enough for thousands of choices (1 per character) and for classes of Unicode
# (15,000), while `(((a{100}){100}){100}){100}` would use millions, at 150 MB each.
_FUEL, _FUEL_PER_CHAR = 30_000, 2
_STEP_FUEL = 50_000  # the same for one token, in the engine's thread: 20 ms
_MOST_STATES = 50_000  # of a lexer: about two per character of a string whose length is counted
MOST_CHARS = 2**18  # of a form, since other requests wait while it is compiled: seconds for a million


class GrammarProcessor(LogitsProcessor):
    """
    Processor that allows the tokens with which the answer can still take its form. It has the state of one request of
    one row. If other processors forbid all these tokens, the form takes precedence, and they are equally likely.

    Args:
        matcher (`LLMatcher`): State of the grammar at the answer's beginning.
        prompt_len (`int`): Tokens before the answer.

    Attributes:
        error (`str`, *optional*): Why the grammar has failed: following it any further takes too much work.
    """

    def __init__(self, matcher: LLMatcher, prompt_len: int):
        self._matcher, self._num_seen = matcher, prompt_len
        self.error: str | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for token in input_ids[0, self._num_seen :].tolist():
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._num_seen = input_ids.shape[1]
        bias = self._matcher.compute_logit_bias() if not self._matcher.is_error() else b""
        if self._matcher.is_error():
            self.error = _reason(self._matcher)
            raise RuntimeError(f"The grammar failed: {self.error}")
        allowed = np.frombuffer(bias, np.uint8).astype(bool)[: scores.shape[1]]
        mask = torch.zeros(scores.shape[1], dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed)
        mask = mask.to(scores.device)
        result = scores.masked_fill(~mask, -torch.inf)
        is_stuck = (result == -torch.inf).all(-1, keepdim=True)
        return result.masked_fill(mask & is_stuck, 0.0)  # type: ignore[return-value]


class Grammars:
    """
    Compiler of grammars for a model's tokens. It is used from one thread; the first use may take a second. Nothing is
    cached: a lexer grows with the texts that follow it, and a grammar that is ready at once would show that another
    tenant uses it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer.
        vocab_size (`int`): Size of the model's scores.
        eos_token_ids (list of `int`): Tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: list[int]):
        self._tokenizer = tokenizer
        self._num_tokens, self._eos_token_ids = max(vocab_size, len(tokenizer)), eos_token_ids
        self._llguidance_tokenizer: Any = None

    def processor(self, form: str) -> Callable[[int], GrammarProcessor]:
        """
        Return a function that makes a processor for a prompt's length, for a form of `form_of`.

        Raises:
            ApiError: 400, for an invalid grammar, and for one that takes too much work.
        """
        matcher = self._compile(form)
        return lambda prompt_len: GrammarProcessor(matcher.deep_copy(), prompt_len)

    def _compile(self, form: str) -> LLMatcher:
        kind, value = json.loads(form)
        field = "tools" if kind == "tools" else "response_format"
        if len(form) > MOST_CHARS:
            message = f"{field}: {len(form)} characters are too many: at most {MOST_CHARS} are accepted"
            raise ApiError(400, message, field)
        if self._llguidance_tokenizer is None:
            self._llguidance_tokenizer = llguidance.hf.from_tokenizer(
                self._tokenizer,  # type: ignore[arg-type]  # a fast tokenizer, as was checked before
                n_vocab=self._num_tokens,
                eos_token=self._eos_token_ids or None,
            )
        try:
            matcher = LLMatcher(self._llguidance_tokenizer, _grammar(kind, value), log_level=0, limits=_limits(form))
        except Exception as error:  # of several kinds, for invalid schemas
            raise ApiError(400, f"{field}: {error}", field) from None
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_logit_bias()  # most of a lexer's work, done here rather than in the engine's thread
        if first.is_error():
            raise ApiError(400, f"{field}: {_reason(first)}", field)
        return matcher


def _limits(form: str) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=_FUEL + _FUEL_PER_CHAR * len(form),
        step_lexer_fuel=_STEP_FUEL,
        max_lexer_states=_MOST_STATES,
        verbose_errors=False,
    )


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's message without the state or backtrace after it."""
    return matcher.get_error().partition("\n<")[0]


def _grammar(kind: str, value: Any) -> str:
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(value, defaults=LAYOUT)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    return LLMatcher.grammar_from_lark(value)


def form_of(response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None = None) -> str | None:
    """
    Return the form that a request asks for, as a string; None for free text.

    Args:
        response_format (`dict`, *optional*): OpenAI's field, of type "text", "json_object" or "json_schema".
        structured (`dict`, *optional*): vLLM's `structured_outputs`, with "json", "regex", "choice" or "grammar".

    Raises:
        ApiError: 400, for other contents.
    """
    if structured is not None:
        return _structured(structured)
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps(["json", _ANY_OBJECT])
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)  # `/v1/responses` has it one level higher
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping):
            return json.dumps(["json", schema])
        raise ApiError(400, "response_format: json_schema needs a schema, an object", param="response_format")
    message = f"response_format: type must be text, json_object or json_schema, got {kind!r}"
    raise ApiError(400, message, param="response_format")


def _structured(structured: Mapping[str, Any]) -> str:
    given = {name: value for name, value in structured.items() if value is not None}
    if len(given) != 1:
        raise ApiError(400, f"structured_outputs: pass one of {_FORMS}", param="structured_outputs")
    kind, value = next(iter(given.items()))
    if kind == "json" and isinstance(value, str | Mapping):
        return json.dumps(["json", value])
    if kind in ("regex", "grammar") and isinstance(value, str):
        return json.dumps([kind, value])
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return json.dumps(["regex", "|".join(map(re.escape, value))])
    raise ApiError(400, f"structured_outputs: must be one of {_FORMS}, of the right type", param="structured_outputs")
