"""The engine for continuous batching: requests enter and leave one decoding loop while others run."""

import threading
import time
import weakref
from collections.abc import AsyncGenerator, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.learning import Learning
from ..decoding.statistics import GenerationStatistics
from ..decoding.trace import RequestTrace
from ..goodput import CostModel, GoodputAuction
from ..goodput.report import LoggedPolicy, SpeculationReport
from ..prepare.call import cost_of
from ..prepare.config import SmartSpecConfig
from ..prepare.entry import generating_model
from ..prepare.sources import Drafters, resolve
from ..target_model.cost.profiling import mend_profile
from ..target_model.forward.ranks import engine_ranks
from ..validate import check_positive, check_weights
from .logprobs import LogprobsRecorder
from .memory.base import RequestMemory
from .memory.budget import Budget
from .memory.choice import memory_of
from .offline import OfflineCalls, answers
from .outputs import EngineOutput, PendingRequest, Results
from .preparation import RequestPreparation, check_positions
from .prompts import check_prompts, prompt_ids
from .worker import EngineRunner


class Engine:
    """
    Engine that serves requests with continuous batching and speculative decoding. Each request gets the same tokens as
    from `model.generate` by itself. Methods have the names of transformers' `ContinuousBatchingManager`.

    Args:
        model (`PreTrainedModel`): A causal language model, or one with an encoder that reads tokens. If requests cannot
            share its forwards, each request gets its own, and a warning says so.
        assistant: The drafter of requests that name none, see `SmartSpecConfig.assistant`. The `policy` of a
            `SmartSpecConfig`, by default the goodput auction, decides how much to draft for all requests.
        max_batch_size (`int`): Requests that run at once.
        max_kv_bytes (`int` or `Budget`, *optional*): Bound on the memory of keys and values, those of the engine's own
            draft models included, which have room for as many tokens as the target. Default: half of a GPU's free
            memory or a quarter of a CPU's, but no more than twice what a full batch of the longest texts takes
            (256 MiB if that is less). A request reserves memory for the length that it may reach, rounded up by at most
            a factor of the square root of two. When the memory grows, it is copied: old and new exist for a while.
        max_prefill_tokens (`int`, *optional*): Prompt tokens per step. Longer prompts are spread over several steps, in
            which the other requests go on decoding. Default: 512 on a CPU, else 2,048.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Allows prompts to be text or chats, and serves
            `stop_strings`.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): The draft model's tokenizer, if it differs.
        online (`OnlineDistillation`, *optional*): Trains draft models and heads on the texts that the engine serves.
        max_requests_per_namespace (`int`, *optional*): Requests of one namespace (`SmartSpecConfig.namespace`) that may
            wait and run at once; further ones are refused. Default: any number, since namespaces take turns.
        namespace_weights (mapping of namespaces to `float`, *optional*): Shares of rows and memory, relative to those
            of other namespaces, whose weight is 1. They count when several namespaces have requests.

    Call `stop()` at the end, or use the engine in a `with` block. An engine that is no longer referenced stops by
    itself, and cancels the requests that still run.

    Example:

        >>> with hf_smartspec.Engine(model, assistant="auto", tokenizer=tokenizer) as engine:
        ...     request_id = engine.add_request("def fib(n):", max_new_tokens=64)
        ...     output = engine.get_result(request_id)
        >>> tokenizer.decode(output.generated_tokens)

    Raises:
        ValueError: if the model has an encoder that does not read tokens, or one row's states exceed `max_kv_bytes`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: Any = "auto",
        max_batch_size: int = 32,
        max_kv_bytes: int | Budget | None = None,
        max_prefill_tokens: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        online: Learning | None = None,
        max_requests_per_namespace: int | None = None,
        namespace_weights: Mapping[Hashable, float] | None = None,
    ):
        check_positive("max_batch_size", max_batch_size)
        for name, number in (
            ("max_kv_bytes", max_kv_bytes),
            ("max_prefill_tokens", max_prefill_tokens),
            ("max_requests_per_namespace", max_requests_per_namespace),
        ):
            if not isinstance(number, Budget | None):
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
        drafters = Drafters()
        self._assistant = resolve(self.config, self.model, drafters)
        budget = max_kv_bytes if isinstance(max_kv_bytes, Budget) else Budget(max_kv_bytes)
        stages = self._assistant.source.stages
        drafting = sum(stage.bytes_per_token() for stage in stages)
        states = sum(stage.bytes_per_request() for stage in stages)
        self._memory = self._new_memory(max_batch_size, budget._replace(drafting=drafting, states=states))
        if max_prefill_tokens is None:
            max_prefill_tokens = 512 if self.model.device.type == "cpu" else 2048
        scheduler = self._memory.scheduler
        scheduler.weights = dict(namespace_weights or {})
        scheduler.lends_rows = self._memory.shares_forward and self.model.device.type != "cpu"  # where rows cost little
        self._preparing = RequestPreparation(self.model, tokenizer, self._assistant, drafters, self._memory)
        self.results = Results()
        self._policy = self._make_policy()
        ranks = engine_ranks(self.model)
        if ranks is not None and max_requests_per_namespace is not None:
            raise ValueError(
                "`max_requests_per_namespace` is not supported when several processes hold the model, since they count "
                "requests at different moments: leave it out, and count requests in the first process."
            )
        self._runner = EngineRunner(
            self.model, self._memory, self._policy, max_prefill_tokens, self.results, ranks,
            max_requests_per_namespace,
        )  # fmt: skip
        weakref.finalize(self, EngineRunner.ask_to_end, self._runner)
        self._num_names = 0
        self._lock, self._offline = threading.Lock(), OfflineCalls()

    def _new_memory(self, max_batch_size: int, budget: Budget) -> RequestMemory:
        return memory_of(self.model, max_batch_size, budget)

    def _new_auction(self, cost: CostModel) -> GoodputAuction:
        return GoodputAuction(cost)

    def _make_policy(self) -> LoggedPolicy:
        config, source = self._assistant
        policy = config.policy_for(source)
        if policy is not None:
            return LoggedPolicy(policy, getattr(policy, "cost", None))
        cost = cost_of(self.model) if self._memory.shares_forward else None
        if cost is None:
            return LoggedPolicy(config.fixed_policy_for(source))
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
        logprobs: bool = False,
        **kwargs: Any,
    ) -> str:
        """
        Queue a request and return its name. It is served once the engine has been started. Namespaces take turns;
        within a namespace, requests are served in the order of arrival.

        Args:
            input_ids (sequence of `int`, or tensor of shape `[length]`): The prompt, or the text for the model's
                encoder. If the engine has a tokenizer, also text, or a chat to answer: a list of messages (`{"role":
                "user", "content": "..."}`).
            request_id (`str`, *optional*): A new name for the request; generated if omitted.
            streaming (`bool`): Whether outputs are available while the request runs.
            record_timestamps (`bool`): Whether outputs have the time at which each token was generated (`timestamps`).
            assistant (*optional*): The drafter, in place of the engine's: "none" for no speculation, or a
                `SmartSpecConfig` for a bound on draft nodes or a namespace. Default: the assistant of the request's
                `generation_config`, if it names one; the model's `generation_config` is not asked.
            seed (`int`, *optional*): Seed for sampling: the same seed yields the same tokens.
            tag (`str`, *optional*): The kind of text, for `RoutedCandidates`; as in `SmartSpecConfig`.
            trace (`bool`): Whether outputs have the source of each token and the draft tree of every step, which makes
                steps slightly slower.
            logprobs (`bool`): Whether outputs have the log-probability of each token under its final scores
                (`logprobs`), to which temperature and all processors have been applied.
            kwargs: Anything that `model.generate` takes for one prompt (`do_sample`, `temperature`, `stop_strings` with
                `tokenizer`, `logits_processor`, `stopping_criteria`, `streamer`, ...).

        Returns:
            The name of the request.

        Raises:
            ValueError, TypeError: for arguments that cannot be served, and for a request that can never fit into
                memory.
            RuntimeError: if the namespace has `max_requests_per_namespace` requests already.
        """
        ids = prompt_ids(input_ids, self.tokenizer)
        if max_new_tokens is not None:
            kwargs["max_new_tokens"] = max_new_tokens
        recorder = LogprobsRecorder() if logprobs else None
        call = self._preparing.call_of(ids, assistant, seed, kwargs, tag, recorder)
        request = call.requests[0]
        if trace:
            request.trace = RequestTrace(request)
        check_positions(self.model, request.length + (request.max_new_tokens or 0) - 1)
        if self.model.config.is_encoder_decoder:
            check_positions(self.model, ids.shape[1], of_decoder=False)
        self._memory.scheduler.check(self._memory.size_of(call))
        if request_id is None:
            request_id = self.new_name()
        output = EngineOutput(request_id, ids[0].tolist(), created_time=time.perf_counter())
        output.timestamps = [] if record_timestamps else None
        self._runner.submit(PendingRequest(call, output, streaming, recorder))
        return request_id

    def add_requests(self, inputs: Sequence[Any], **kwargs: Any) -> list[str]:
        """
        Queue a request for each prompt, with the same arguments, and return their names: see `add_request`. If one is
        refused, the others are cancelled.
        """
        check_prompts(inputs)
        names: list[str] = []
        try:
            for input_ids in inputs:
                names.append(self.add_request(input_ids, **kwargs))
        except BaseException:
            for name in names:
                self.cancel_request(name, discard=True)
            raise
        return names

    def check_arguments(
        self, assistant: Any = None, tag: str | None = None, streamer: Any = None, **kwargs: Any
    ) -> None:
        """Raise `ValueError` or `TypeError` if no request can be served with these arguments of `add_request`."""
        self._preparing.call_of(torch.zeros(1, 1, dtype=torch.long), assistant, 0, kwargs)  # with a seed, none is drawn

    def cancel_request(self, request_id: str, discard: bool = False) -> None:
        """
        End a request early, with the tokens so far as its output; with `discard`, without an output, even if the
        request is finished. Unknown and finished requests are ignored.
        """
        if discard:
            self.results.discard(request_id)
        self._runner.cancel(request_id)

    def new_name(self) -> str:
        """Return a new name for a request."""
        with self._lock:
            while (name := f"req_{self._num_names}") in self.results:
                self._num_names += 1
            self._num_names += 1
            return name

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> EngineOutput | None:
        """
        Remove and return the finished output of a request, or of the first request that has one. Return None after
        `timeout` seconds, or if no output will come.

        Raises:
            RuntimeError: if the engine does not run and the request is unfinished.
        """
        self._runner.check_thread()
        is_running = self.is_running
        output = self.results.get(request_id, timeout if is_running else 0)
        if output is None and not is_running:
            self._check_runs(request_id)
        return output

    def __iter__(self) -> Iterator[EngineOutput]:
        """Yield finished outputs as they come, until every request is answered."""
        self._check_runs()
        while (output := self.results.get()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[EngineOutput]:
        """
        Yield outputs of one request, each with all tokens so far; the last one is finished. Requests that were added
        without `streaming=True` have only that one. A slow reader misses steps, but no tokens.

        Raises:
            RuntimeError: if the engine does not run and the request is unfinished, since waiting would never end.
        """
        self._check_runs(request_id)
        return self._held(self.results.stream(request_id))

    def request_id_aiter(self, request_id: str) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs of `request_id_iter`, for `async for`."""
        self._check_runs(request_id)
        return self._held_async(self.results.stream_async(request_id))

    # These generators hold a reference to the engine, which otherwise might stop while its outputs are read.

    def _held(self, outputs: Iterator[EngineOutput]) -> Iterator[EngineOutput]:
        yield from outputs

    async def _held_async(self, outputs: AsyncGenerator[EngineOutput, None]) -> AsyncGenerator[EngineOutput, None]:
        async with aclosing(outputs) as items:
            async for output in items:
                yield output

    def _check_runs(self, request_id: str | None = None) -> None:
        self._runner.check_thread()
        if not self.is_running and self.results.is_open(request_id):
            raise RuntimeError("The engine does not run: call `start()`, or use it in a `with` block.")

    def generate(self, prompts: Sequence[Any], progress_bar: bool = False, **kwargs: Any) -> list[EngineOutput]:
        """
        Serve a list of prompts and return their outputs in the same order. The engine is started for the time of the
        call if it does not run. An interrupt cancels the remaining requests.
        """
        self._runner.check_thread()
        check_prompts(prompts)
        with self._offline.running(self):
            return answers(self, prompts, progress_bar, kwargs)

    # Life

    @property
    def is_running(self) -> bool:
        return self._runner.is_running

    @property
    def fatal_error(self) -> BaseException | None:
        """Return the error that has ended the engine's thread since its last start, if any."""
        return self._runner.fatal_error

    @property
    def running(self) -> list[str]:
        """Return the names of running requests."""
        return [pending.output.request_id for pending in list(self._memory.scheduler.running)]

    @property
    def waiting(self) -> list[str]:
        """Return the names of waiting requests."""
        return self._runner.waiting

    @property
    def max_tokens(self) -> int | None:
        """Return the tokens that a request may reach by the bound on memory; None if memory is counted in bytes."""
        return self._memory.max_tokens

    @property
    def statistics(self) -> GenerationStatistics:
        """Return counts over all finished requests, and over all steps."""
        return self._runner.loop.statistics

    def report(self) -> SpeculationReport:
        """Return a report on speed: where the time went, which drafts were rejected, what other lengths would yield."""
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
        """Start serving in a thread, if the engine does not run yet, and return the engine."""
        self._runner.start()
        return self

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """
        Stop the thread: with `drain`, after every request has been answered or `timeout` seconds have passed, else at
        once. Remaining requests are cancelled.
        """
        self._runner.check_thread()
        session = self._runner.session  # another thread may meanwhile end this one, and start the next
        if drain and self.is_running:
            self.results.wait_until_answered(timeout)
        self._runner.stop(session)
        if self._policy.cost is not None:
            mend_profile(self.model, self._policy.cost)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause all requests, so that the model may be changed. Afterwards, their texts are computed anew."""
        self._runner.check_thread()
        with self._runner.paused():
            yield

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, kind: Any, *details: Any) -> None:
        self.stop(drain=kind is None)
