"""Continuous batching: requests come and go while others run, all in one decoding loop."""

import threading
import time
import weakref
from collections.abc import AsyncGenerator, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from ..decoding.call import DecodingCall
from ..decoding.learning import Learning
from ..decoding.statistics import GenerationStatistics
from ..decoding.trace import RequestTrace
from ..goodput import CostModel, GoodputAuction
from ..goodput.report import LoggedPolicy, SpeculationReport
from ..prepare.arguments import check_arguments
from ..prepare.call import PreparedCall, cost_of, prepare_call
from ..prepare.config import SmartSpecConfig
from ..prepare.encoders import placeholder_outputs
from ..prepare.entry import assistant_of, generating_model, without_assistant
from ..prepare.sources import Drafters, resolve, tagged
from ..target_model.compat import num_positions
from ..target_model.cost.profiling import doubt_profile
from ..target_model.forward.ranks import engine_ranks
from ..validate import check_positive, check_weights
from .memory.base import RequestMemory
from .memory.budget import Budget
from .memory.choice import memory_of
from .outputs import EngineOutput, Results, Ticket
from .prompts import check_prompts, prompt_ids
from .worker import EngineRunner

# Which the engine sees to itself.
_OF_ENGINE = ("attention_mask", "cache", "past_key_values", "inputs_embeds", "encoder_outputs")
_OF_BATCHES = ("num_return_sequences", "return_dict_in_generate")


class Engine:
    """
    Serves requests with continuous batching and speculative decoding: the same tokens as `model.generate` for each by
    itself. Its methods bear the names of transformers' `ContinuousBatchingManager`.

    Args:
        model (`PreTrainedModel`): A causal language model, or one with an encoder that reads tokens. Where requests
            cannot share its forwards, each has its own, as a warning says.
        assistant: What drafts for requests that do not say so themselves, see `SmartSpecConfig.assistant`. The `policy`
            of a `SmartSpecConfig`, by default the goodput auction, decides for all requests how much.
        max_batch_size (`int`): Requests that run at once.
        max_kv_bytes (`int`, *optional*): Bound on the memory of keys and values; half of the free memory of a GPU, a
            quarter of that of a CPU where not given, but no more than twice what a full batch of the longest texts
            takes (256 MiB where that is less). Every request takes as much of it as its own length may reach, in steps
            of the square root of two. Growing copies them, and takes their old memory besides.
        max_prefill_tokens (`int`): Prompt tokens per step. Longer prompts are spread over several steps, in which the
            other requests go on decoding.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Lets prompts be text and chats, and serves `stop_strings`.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): Of a draft model that has another one.
        online (`OnlineDistillation`, *optional*): Draft models and heads learn from what the engine serves.
        max_requests_per_namespace (`int`, *optional*): Requests of one namespace (`SmartSpecConfig.namespace`) that may
            wait and run at once; further ones are refused. Any number, where not given: namespaces take turns.
        namespace_weights (mapping of namespaces to `float`, *optional*): Parts of places and memory, relative to those
            of other namespaces, which have 1, where several have requests.

    `stop()` it, or use it in a `with` block. An engine that nobody refers to any more stops by itself; what still runs
    then is cancelled.

    Example:

        >>> with hf_smartspec.Engine(model, assistant="auto", tokenizer=tokenizer) as engine:
        ...     request_id = engine.add_request("def fib(n):", max_new_tokens=64)
        ...     output = engine.get_result(request_id)
        >>> tokenizer.decode(output.generated_tokens)

    Raises:
        ValueError: if the model has an encoder that reads anything but tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: Any = "auto",
        max_batch_size: int = 32,
        max_kv_bytes: int | None = None,
        max_prefill_tokens: int = 512,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        online: Learning | None = None,
        max_requests_per_namespace: int | None = None,
        namespace_weights: Mapping[Hashable, float] | None = None,
    ):
        for name, value in (("max_batch_size", max_batch_size), ("max_prefill_tokens", max_prefill_tokens)):
            check_positive(name, value)
        for name, number in (
            ("max_kv_bytes", max_kv_bytes),
            ("max_requests_per_namespace", max_requests_per_namespace),
        ):
            if number is not None:
                check_positive(name, number)
        check_weights("namespace_weights", namespace_weights or {})
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"`tokenizer` must be a tokenizer of transformers, got {type(tokenizer).__name__}.")
        self.tokenizer = tokenizer
        target: Any = generating_model(model)
        self.model: PreTrainedModel = target
        config = assistant if isinstance(assistant, SmartSpecConfig) else SmartSpecConfig(assistant)
        config = config if online is None else replace(config, online=online)
        self.config = config.with_tokenizers(tokenizer, assistant_tokenizer)
        self._memory = self._new_memory(max_batch_size, max_kv_bytes)
        scheduler = self._memory.scheduler
        scheduler.weights = dict(namespace_weights or {})
        scheduler.lends = self._memory.shares_forward and self.model.device.type != "cpu"  # where rows cost little
        self._drafters = Drafters()
        self._assistant = resolve(self.config, self.model, self._drafters)
        self._results = self._new_results()
        self._policy = self._make_policy()
        ranks = engine_ranks(self.model)
        if ranks is not None and max_requests_per_namespace is not None:
            raise ValueError(
                "`max_requests_per_namespace` cannot be kept by several processes that hold a model, which take "
                "requests at different moments: leave it out, and count them in the first process."
            )
        self._runner = EngineRunner(
            self.model, self._memory, self._policy, max_prefill_tokens, self._results, ranks,
            max_requests_per_namespace,
        )  # fmt: skip
        weakref.finalize(self, EngineRunner.end, self._runner)
        self._names = 0
        self._lock, self._offline = threading.Lock(), threading.Lock()
        self._num_offline = 0  # calls of `generate` for which the engine runs

    def _new_memory(self, max_batch_size: int, max_bytes: int | None) -> RequestMemory:
        return memory_of(self.model, max_batch_size, Budget(max_bytes))

    def _new_results(self) -> Results:
        return Results()

    def _new_auction(self, cost: CostModel) -> GoodputAuction:
        return GoodputAuction(cost)

    def _make_policy(self) -> LoggedPolicy:
        policy = self.config.policy_for(self._assistant.source)
        if policy is not None:
            return LoggedPolicy(policy, getattr(policy, "cost", None))
        cost = cost_of(self.model) if self._memory.shares_forward else None
        if cost is None:
            return LoggedPolicy(self.config.fixed_policy_for(self._assistant.source))
        return LoggedPolicy(self._new_auction(cost), cost)

    # Requests

    def add_request(
        self,
        input_ids: Sequence[int] | np.ndarray | torch.Tensor | str | Sequence[dict[str, Any]],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        assistant: Any = None,
        seed: int | None = None,
        tag: str | None = None,
        trace: bool = False,
        **kwargs: Any,
    ) -> str:
        """
        Queues a request; it is served in its turn, once the engine has been started. Namespaces take turns; within one,
        requests are served in the order in which they come.

        Args:
            input_ids (sequence of `int`, or tensor of shape `[length]`): The prompt, or what the model's encoder reads.
                Where the engine has a tokenizer, text too, or a chat: a list of messages (`{"role": "user",
                "content": "..."}`) to answer.
            request_id (`str`, *optional*): Its name; made up where not given.
            streaming (`bool`): Whether outputs are handed out while it runs, too.
            record_timestamps (`bool`): Whether outputs say when each token was there (`timestamps`).
            assistant (*optional*): What drafts for it, in place of the engine's: "none" for no speculation, or a
                `SmartSpecConfig` for a bound on draft nodes or a namespace. By default, what a `generation_config` of
                the request's says; that of the model says nothing here.
            seed (`int`, *optional*): For sampling: the same tokens for the same seed.
            tag (`str`, *optional*): What kind of text it is, where `RoutedCandidates` draft; as in `SmartSpecConfig`.
            trace (`bool`): Whether outputs tell which source drafted each token, and every step's draft tree; this
                takes some time of each of its steps.
            kwargs: Anything that `model.generate` takes for one prompt (`do_sample`, `temperature`, `stop_strings` with
                `tokenizer`, `logits_processor`, `stopping_criteria`, `streamer`, ...).

        Returns:
            The name of the request.

        Raises:
            ValueError, TypeError: for arguments that cannot be served, and requests that can never fit into memory.
            RuntimeError: if its namespace has `max_requests_per_namespace` already.
        """
        ids = prompt_ids(input_ids, self.tokenizer)
        if max_new_tokens is not None:
            kwargs["max_new_tokens"] = max_new_tokens
        call = self._prepare(ids, assistant, seed, kwargs, tag)
        request = call.requests[0]
        if trace:
            request.trace = RequestTrace(request)
        self._check_positions(request.length + (request.max_new_tokens or 0) - 1)
        if self.model.config.is_encoder_decoder:
            self._check_positions(ids.shape[1], of_decoder=False)
        self._memory.scheduler.check(self._memory.size_of(call))
        if request_id is None:
            request_id = self._new_name()
        output = EngineOutput(request_id, ids[0].tolist(), created_time=time.perf_counter())
        output.timestamps = [] if record_timestamps else None
        self._runner.submit(Ticket(call, output, streaming))
        return request_id

    def add_requests(self, inputs: Sequence[Any], **kwargs: Any) -> list[str]:
        """`add_request` for each of the prompts, with the same arguments."""
        check_prompts(inputs)
        return [self.add_request(input_ids, **kwargs) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request early: its output is what it has got so far. Unknown and finished ones are ignored."""
        self._runner.cancel(request_id)

    def _check_positions(self, num_tokens: int, of_decoder: bool = True) -> None:
        """Behind the last learned position a forward fails, for all who run in it."""
        config = self.model.config.get_text_config(decoder=of_decoder, encoder=not of_decoder)
        limit = num_positions(config)
        if limit is not None and not getattr(config, "rope_parameters", None) and num_tokens > limit:
            raise ValueError(
                f"The request may feed {num_tokens} tokens and the model has {limit} positions: shorten the prompt or "
                "lower `max_new_tokens`."
            )

    def _new_name(self) -> str:
        with self._lock:
            while (name := f"req_{self._names}") in self._results:
                self._names += 1
            self._names += 1
            return name

    def _prepare(
        self, ids: torch.Tensor, assistant: Any, seed: int | None, kwargs: dict[str, Any], tag: str | None = None
    ) -> DecodingCall:
        """The request as transformers' `generate` prepares it, ready for the loop."""
        for name in (*_OF_ENGINE, *_OF_BATCHES):
            if kwargs.get(name) is not None and not (name in _OF_BATCHES and kwargs[name] in (1, False)):
                raise ValueError(f"`{name}` cannot be served by an engine: leave it out, or use `model.generate`.")
        ids = ids.to(self.model.device)
        to_read = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        kwargs = {"tokenizer": self.tokenizer, **kwargs, **to_read}
        if self.model.config.is_encoder_decoder:
            kwargs |= placeholder_outputs(self.model, ids)
        choice = tagged(self._choice(assistant, kwargs.get("generation_config")), tag)
        arguments, config = check_arguments(self.model, without_assistant(kwargs), choice, seed)
        resolved = resolve(config, self.model, self._drafters)

        def custom_generate(model: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> DecodingCall:
            options: dict[str, Any] = {"assistant": resolved, "seed": seed, "encoder_arguments": to_read}
            options["streamer"] = arguments.get("streamer")  # which transformers drops on the way to a callable
            return self._captured(prepare_call(model, input_ids, **options, **prepared))

        call: Any = GenerationMixin.generate(self.model, **arguments | {"custom_generate": custom_generate})
        return call

    def _choice(self, assistant: Any, config: Any) -> Any:
        """What drafts for a request: what itself or its `generation_config` names, or the engine's own."""
        if assistant is None:
            assistant = assistant_of(config)
        if isinstance(assistant, SmartSpecConfig) and assistant.policy is not None:
            raise ValueError(
                "The `policy` decides for all requests of an engine: give it to the engine's own `assistant`."
            )
        return self._assistant if assistant is None else assistant

    def _captured(self, prepared: PreparedCall) -> DecodingCall:
        """What a decoding method gets, ready for the loop."""
        if len(prepared.input_ids) != 1:
            raise ValueError("`num_return_sequences` must be 1 in an engine: add the request several times.")
        return self._memory.call_of(prepared)

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> EngineOutput | None:
        """
        The finished output of a request, or the next there is, which is thereby taken away. None after `timeout`
        seconds, and if none is to come.

        Raises:
            RuntimeError: if the request waits for an engine that does not run.
        """
        self._runner.check_thread()
        is_running = self.is_running
        output = self._results.get(request_id, timeout if is_running else 0)
        if output is None and not is_running:
            self._check_runs(request_id)
        return output

    def __iter__(self) -> Iterator[EngineOutput]:
        """Finished outputs as they come, until every request is answered."""
        self._check_runs()
        while (output := self._results.get()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[EngineOutput]:
        """
        Outputs of one request, each with all tokens so far; the last one is finished. In between only if it was added
        with `streaming=True`. A slow reader misses steps, but no tokens.

        Raises:
            RuntimeError: if the engine does not run and the output is not there: who waits then waits forever.
        """
        self._check_runs(request_id)
        return self._held(self._results.stream(request_id))

    def request_id_aiter(self, request_id: str) -> AsyncGenerator[EngineOutput, None]:
        """`request_id_iter` for `async for`."""
        self._check_runs(request_id)
        return self._held_async(self._results.stream_async(request_id))

    # Who reads holds the engine, which otherwise might stop.

    def _held(self, outputs: Iterator[EngineOutput]) -> Iterator[EngineOutput]:
        yield from outputs

    async def _held_async(self, outputs: AsyncGenerator[EngineOutput, None]) -> AsyncGenerator[EngineOutput, None]:
        async with aclosing(outputs) as items:
            async for output in items:
                yield output

    def _check_runs(self, request_id: str | None = None) -> None:
        self._runner.check_thread()
        if not self.is_running and self._results.is_open(request_id):
            raise RuntimeError("The engine does not run: `start()` it, or use it in a `with` block.")

    def generate(self, prompts: Sequence[Any], progress_bar: bool = False, **kwargs: Any) -> list[EngineOutput]:
        """
        Serves a list of prompts and returns their outputs in the same order. Starts the engine for the time of the call
        if it does not run. Interrupted, it cancels what is left.
        """
        self._runner.check_thread()
        check_prompts(prompts)
        with self._offline:
            is_own = self._num_offline > 0 or not self.is_running
            self._num_offline += is_own
        names: list[str] = []
        try:
            for prompt in prompts:
                names.append(self._new_name())  # before: an interrupt may come once it is queued
                self.add_request(prompt, request_id=names[-1], **kwargs)
            self.start()
            with tqdm(total=len(names), desc="generating", unit=" requests", disable=not progress_bar) as progress:
                outputs = []
                for name in names:
                    output = self._results.get(name)
                    assert output is not None, "a request was answered to somebody else"
                    outputs.append(output)
                    progress.update()
            return outputs
        except BaseException:
            for name in names:
                self.cancel_request(name)
                self._results.discard(name)
            raise
        finally:
            if is_own:
                with self._offline:
                    self._num_offline -= 1
                    if not self._num_offline:
                        self.stop()

    # Life

    @property
    def is_running(self) -> bool:
        return self._runner.is_running

    @property
    def statistics(self) -> GenerationStatistics:
        """Sums over all requests that have ended, and all steps."""
        return self._runner.loop.statistics

    def report(self) -> SpeculationReport:
        """Why was it slow? Where the time went, what was drafted in vain, and what other lengths would have yielded."""
        runner = self._runner
        return self._policy.report(
            **{
                "Requests": f"{runner.num_answered} answered, waited {runner.seconds_waited:.2f} s in all, gave way to "
                f"other namespaces {runner.num_suspended} times",
                "Prompt tokens reused": self._memory.num_reused,
                "Key/value memory": f"{self._memory.num_bytes / 2**20:.0f} MiB",
            }
        )

    def start(self) -> "Engine":
        """Begins to serve, in a thread of its own. Again to no effect."""
        self._runner.start()
        return self

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """
        Ends the thread: after every request has been answered (`drain`), or at once, and then the rest is cancelled;
        also after `timeout` seconds.
        """
        self._runner.check_thread()
        if drain and self.is_running:
            self._results.wait_until_answered(timeout)
        self._runner.stop()
        if self._policy.cost is not None:
            doubt_profile(self.model, self._policy.cost)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing runs within, so that the model may be changed: requests then go on, with their text computed anew."""
        self._runner.check_thread()
        with self._runner.paused():
            yield

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, kind: Any, *details: Any) -> None:
        self.stop(drain=kind is None)
