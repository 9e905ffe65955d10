"""The fields of requests, with the bounds of their values."""

from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ....log import get_logger

logger = get_logger(__name__)

MOST_CHOICES = 128
_INT64 = 2**63
_MOST_BIASES = 1024
_MOST_ITEMS = 2**13  # of a list; longer ones would take long to check
_MOST_IDS = 2**20
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Item = TypeVar("Item")
# `fail_fast`, since a list of wrong items would otherwise make millions of errors.
Items = Annotated[list[Item], Field(fail_fast=True, max_length=_MOST_ITEMS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=_MOST_IDS)]

# Fields of OpenAI's interface that are ignored without a warning, since that does no harm.
_HARMLESS = frozenset(
    "user metadata store service_tier parallel_tool_calls safety_identifier prompt_cache_key prompt_cache_retention "
    "verbosity modalities reasoning background include truncation max_tool_calls".split()
)


class Fields(BaseModel):
    """Base of requests. Unknown fields are accepted and logged, since clients send fields of many servers."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(Fields):
    """A request's own drafting options. They do not change the generated tokens."""

    model_config = ConfigDict(extra="forbid")
    assistant: Literal["none"] | None = None
    num_nodes: int | None = Field(None, ge=0, le=1024)
    references: Items[str] = Field(default=[], max_length=64)
    learn: bool = True


class Prediction(Fields):
    """OpenAI's predicted output: text that the answer is likely to repeat."""

    type: Literal["content"] = "content"
    content: str | Items["TextPart"]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextPart(Fields):
    type: str = "text"
    text: str


class GenerationFields(Fields):
    """Fields of all routes: OpenAI's, and vLLM's for further options of `generate`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    no_repeat_ngram_size: int | None = Field(None, ge=0, lt=2**31)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: str | Annotated[Items[Annotated[str, Field(max_length=1024)]], Field(max_length=64)] | None = None
    stop_token_ids: Items[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    generation_config: str | None = None  # of `transformers chat`: defaults for the others

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: str | list[str] | None) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop or []
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, biases: Any) -> Any:
        if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
            raise ValueError(f"at most {_MOST_BIASES} tokens may have a bias")
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _biases_of_tokens(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        if biases and not all(name.isascii() and name.isdigit() and len(name) < 10 for name in biases):
            raise ValueError("keys must be token ids")
        return biases

    @model_validator(mode="after")
    def _streams_with_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream to true")
        return self

    @property
    def stops(self) -> list[str]:
        return list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """Return whether every chunk of a stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Message(Fields):
    role: str
    content: str | Items[dict[str, Any]] | None = None
    tool_calls: Items[dict[str, Any]] | None = None


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    """A function that must be called. In chats, its name lies one level deeper than in responses."""

    type: Literal["function"]
    function: NamedFunction | None = None
    name: str | None = None

    @property
    def called(self) -> str | None:
        return self.name if self.function is None else self.function.name


class ToolFields(GenerationFields):
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class ChatFields(ToolFields):
    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _tops_with_logprobs(self) -> "ChatFields":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class CompletionFields(GenerationFields):
    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[Items[str], Field(min_length=1, max_length=1024)]
        | Annotated[Items[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
    )
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _no_best_of(self) -> "CompletionFields":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported: ask for n choices, with logprobs")
        return self

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts, as texts or lists of token ids."""
        prompt: Any = self.prompt
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_single else list(prompt)


class Reasoning(Fields):
    effort: str | None = None


class ResponseFields(ToolFields):
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None

    @model_validator(mode="after")
    def _no_stored_responses(self) -> "ResponseFields":
        if self.previous_response_id:
            raise ValueError("previous_response_id: responses are not stored; send the whole conversation")
        if self.n not in (None, 1):
            raise ValueError("n must be 1")
        return self


Kind = TypeVar("Kind", bound=Fields)


def log_ignored(fields: Fields) -> None:
    """Log which fields of a request have no effect."""
    given = fields.model_extra or {}
    ignored = sorted(name for name in given.keys() - _HARMLESS if given[name] is not None)
    if ignored:
        _log_once(repr(ignored)[:200])


@lru_cache(maxsize=256)  # bounded: clients choose the names
def _log_once(names: str) -> None:
    logger.warning(f"Unknown fields are ignored: {names}")
