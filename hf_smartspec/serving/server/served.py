"""Served models: an engine with its tokenizer, to which requests are added."""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ...prepare.call import model_limits
from ...prepare.config import SmartSpecConfig
from ...prepare.sources import Assistant
from ..logprobs import LogprobsRecorder
from ..outputs import EngineOutput
from .answers import Answer
from .engine import ServedEngine
from .errors import ApiError
from .guard.keys import CALLER, Caller
from .guard.limits import Limits, OpenRequests, max_answer_tokens
from .metrics import ServerMetrics
from .request.grammar import GrammarProcessor, Grammars
from .request.sampling import Settings, eos_ids
from .tokens import KNOWN_NODES, ForcedText, KnownText, Penalties, StopTexts, TextStream

Result = TypeVar("Result")
_MOST_CHARS = 2**21  # of a text for a model without a maximum context length
_CHARS_PER_TOKEN = 8  # more than texts have on average
_SPARE_TOKENS = 64  # by which the beginning of a text may have more tokens than the same part within the whole text


class _Prepared(NamedTuple):
    """The drafter of a request's answers, and a factory of processors for the form that they must have."""

    assistant: SmartSpecConfig | Assistant
    grammar: Callable[[int], GrammarProcessor] | None = None


class ServedModel:
    """
    A model with the engine that serves it.

    Args:
        name (`str`): The model's name for clients.
        engine (`ServedEngine`): Engine with a tokenizer of the `tokenizers` library.
        limits (`Limits`): Bounds on requests.
        metrics (`ServerMetrics`): Counts requests.
        max_batch_size (`int`): Requests that the engine runs at once.

    Raises:
        ValueError: without such a tokenizer.
    """

    def __init__(self, name: str, engine: ServedEngine, limits: Limits, metrics: ServerMetrics, max_batch_size: int):
        if engine.tokenizer is None or not engine.tokenizer.is_fast:
            raise ValueError(f"{name!r} has no tokenizer of the `tokenizers` library, which a server needs.")
        self.name, self.engine, self.limits, self.metrics = name, engine, limits, metrics
        self.model: PreTrainedModel = engine.model
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self.created = int(time.time())
        own = model_limits(self.model)
        given = [value for value in (limits.max_model_len, own.num_positions) if value is not None]
        self.max_model_len = min(given, default=None)
        longest = max(map(len, self.tokenizer.get_vocab()))
        self.max_chars = _MOST_CHARS if self.max_model_len is None else self.max_model_len * longest
        self.open = OpenRequests(limits, max_batch_size)
        self._vocab_size = own.vocab_size
        self._grammars = Grammars(self.tokenizer, own.vocab_size, eos_ids(self.model.generation_config))
        # One thread encodes texts and adds requests, so that the event loop goes on meanwhile. It drops requests, too,
        # and so never before they have been added.
        self._worker = ThreadPoolExecutor(1, f"requests of {name}")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by namespace

    async def in_worker(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run a slow function in the worker thread; one call per namespace at a time, so that others wait briefly."""
        async with self._turns[CALLER.get().namespace]:
            return await asyncio.get_running_loop().run_in_executor(self._worker, partial(function, *args))

    def stop(self) -> None:
        """Stop the engine and cancel its requests."""
        self._worker.shutdown()  # after it has dropped the requests of clients that have left
        self.engine.stop(drain=False)

    def encode(self, prompt: str | Sequence[int], field: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """
        Return the token ids of a prompt.

        Raises:
            ApiError: 400, for an empty prompt, for tokens outside the vocabulary, and for too long a text.
        """
        ids = self.tokens_of(prompt, field, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ApiError(400, "The prompt is empty: it must have at least one token", param=field)
        self._check_tokens(ids, field)
        return ids

    def tokens_of(self, text: str, field: str, add_special_tokens: bool = False) -> list[int]:
        """
        Return the token ids of a text.

        Raises:
            ApiError: 400, for a text with more characters than the context's number of longest tokens has, or whose
                beginning has more tokens than the context. Encoding it would only keep other requests waiting.
        """
        self._check_chars(len(text), field)
        if self.max_model_len is not None and len(text) > _CHARS_PER_TOKEN * self.max_model_len:
            first = self.tokenizer(text[: _CHARS_PER_TOKEN * self.max_model_len], add_special_tokens=False).input_ids
            if len(first) > self.max_model_len + _SPARE_TOKENS:
                raise ApiError(
                    400,
                    f"{field}: its {len(text)} characters have more tokens than the maximum context length of "
                    f"{self.max_model_len}",
                    param=field,
                    code="context_length_exceeded",
                )
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def _check_chars(self, num_chars: int, field: str) -> None:
        if num_chars > self.max_chars:
            most = (
                "" if self.max_model_len is None else f" for the maximum context length of {self.max_model_len} tokens"
            )
            raise ApiError(
                400,
                f"{field}: {num_chars} characters are too many{most}: at most {self.max_chars} are accepted",
                param=field,
                code="context_length_exceeded",
            )

    def check_count(self, count: int) -> None:
        """Raise `ApiError`, 400, for more answers to one request than can ever be open."""
        self.open.check_count(count)

    async def begin(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        usual_tokens: int | None = None,
        keeps_special: bool = False,
        prediction: Sequence[int] | None = None,
    ) -> list[Answer]:
        """
        Add requests to the engine, one per prompt and choice in this order, and return their answers.

        Args:
            usual_tokens (`int`, *optional*): Tokens of an answer if the request sets no limit; by default those of
                `limits`.
            keeps_special (`bool`): Whether texts contain special tokens.
            prediction (sequence of `int`, *optional*): Tokens of the predicted output, see `prediction_of`.

        Raises:
            ApiError: 400, for arguments that cannot be served, 429 if too many requests wait, 503 if the engine has
                stopped.
        """
        if not self.engine.is_running:
            raise ApiError(503, f"{self.name} has stopped", retry_after=1)
        self._check_tokens([ids[0][0] for ids in settings.arguments.get("sequence_bias") or ()], "logit_bias")
        self._check_tokens(settings.arguments.get("eos_token_id") or (), "stop_token_ids")
        usual = self.limits.max_new_tokens if usual_tokens is None else usual_tokens
        room = [max_answer_tokens(len(ids), settings.max_new_tokens, usual, self.max_model_len) for ids in prompts]
        count = len(prompts) * len(settings.seeds)
        caller = CALLER.get()
        namespace = caller.namespace
        self.open.add(namespace, count)
        answers: list[Answer] = []
        try:
            prepared = await self.in_worker(self._prepared, settings, caller, prediction)
            for ids, limit in zip(prompts, room):
                for seed in settings.seeds:
                    answers.append(await self._begin(ids, limit, seed, settings, prepared, keeps_special))
        except BaseException:
            self.open.remove(namespace, count - len(answers))
            for answer in answers:
                answer.drop()
            raise
        return answers

    def _check_tokens(self, ids: Sequence[int], field: str) -> None:
        """Raise `ApiError`, 400, for a token outside the vocabulary."""
        for token in ids:
            if token >= self._vocab_size:
                message = f"{field}: the model has {self._vocab_size} tokens, and {token} is none of them"
                raise ApiError(400, message, param=field)

    def _prepared(self, settings: Settings, caller: Caller, prediction: Sequence[int] | None) -> "_Prepared":
        namespace = caller.namespace
        grammar = None if settings.form is None else self._grammars.processor(settings.form)
        if settings.known is not None:
            return _Prepared(SmartSpecConfig(KnownText(settings.known), num_nodes=KNOWN_NODES, namespace=namespace))
        if settings.assistant is not None:
            return _Prepared(SmartSpecConfig(settings.assistant, namespace=namespace), grammar)
        field = "speculation.references"
        self._check_chars(sum(map(len, settings.references)), field)
        texts = [self.tokens_of(text, field) for text in settings.references]
        self.check_length([token for ids in texts for token in ids], field)
        # All choices get the same arrays, so that sources may index them once.
        references = [np.array(ids, np.int64) for ids in [*texts, prediction] if ids]
        teaches = caller.teaches and settings.teaches
        own = self.engine.own_assistant(settings.num_nodes, namespace, teaches, references=references)
        return _Prepared(own, grammar)

    async def _begin(
        self,
        ids: Sequence[int],
        limit: int,
        seed: list[int] | None,
        settings: Settings,
        prepared: "_Prepared",
        keeps_special: bool,
    ) -> Answer:
        recorder = None if settings.num_top is None else LogprobsRecorder(settings.num_top)
        processors = LogitsProcessorList([] if recorder is None else [recorder])
        if settings.presence or settings.frequency:
            processors.append(Penalties(settings.presence, settings.frequency, len(ids)))
        grammar = None if prepared.grammar is None else prepared.grammar(len(ids))
        if grammar is not None:
            processors.append(grammar)
        if settings.known is not None:
            processors.append(ForcedText(settings.known, len(ids)))
        arguments = settings.arguments | {"max_new_tokens": limit, "assistant": prepared.assistant, "seed": seed}
        if processors:
            arguments["logits_processor"] = processors
        if settings.stops:
            criterion = StopTexts(TextStream(self.tokenizer, settings.stops, keeps_special), len(ids))
            arguments["stopping_criteria"] = StoppingCriteriaList([criterion])
        text = TextStream(self.tokenizer, settings.stops, keeps_special, settings.keeps_stop)
        request_id = uuid.uuid4().hex
        add = partial(self.engine.add_request, ids, request_id=request_id, streaming=True, **arguments)
        try:
            await self.in_worker(add)
        except asyncio.CancelledError:
            self._drop(request_id)  # runs after the request has been added
            raise
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ApiError(400, str(error)) from None
        return Answer(self, request_id, ids, text, recorder, self.limits.timeout, CALLER.get().namespace, grammar)

    def abort(self, request_id: str, namespace: str) -> None:
        """Drop a request whose client has left."""
        self.open.remove(namespace)
        self.metrics.count_abort(self.name, request_id)
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._worker.submit(self.engine.cancel_request, request_id, discard=True)

    async def prediction_of(self, settings: Settings) -> list[int] | None:
        """
        Return the tokens of the predicted output, if there is one.

        Raises:
            ApiError: 400, if it is longer than an answer can be.
        """
        text = settings.prediction
        if text is None:
            return None
        ids = await self.in_worker(self.tokens_of, text, "prediction")
        self.check_length(ids, "prediction")
        return ids

    def check_length(self, ids: Sequence[int], field: str) -> None:
        """Raise `ApiError`, 400, for more tokens than the context holds."""
        if self.max_model_len is not None and len(ids) > self.max_model_len:
            message = f"{field}: it has {len(ids)} tokens, but at most {self.max_model_len} are accepted"
            raise ApiError(400, message, param=field)

    def count_step(self, output: EngineOutput) -> None:
        """Count further tokens of an unfinished answer."""
        self.metrics.count_step(self.name, output)

    def count_end(self, output: EngineOutput, namespace: str) -> None:
        self.open.remove(namespace)
        self.metrics.count_end(self.name, output)
