"""transformers' `ContinuousBatchingManager`, over an engine that speculates."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedModel

from ...decoding.call import DRAFT_ROOM
from ...decoding.statistics import GenerationStatistics, record_call
from ...goodput import CostModel, GoodputAuction
from ...log import get_logger
from ...prepare.call import borrow_policy, model_limits
from ...prepare.entry import Choice, without_defaults
from ...prepare.route import way_of
from ...sampling.noise import row_seed
from ...target_model.forward.ranks import broadcast_from_rank0
from ...target_model.model_state import state_of
from ...validate import check_seed
from ..engine import Engine
from ..outputs import EngineOutput, failed
from .settings import engine_options, request_arguments

logger = get_logger(__name__)

# Arguments of `add_request` for the HTTP request that transformers' server answers in this context.
http_settings: ContextVar[Mapping[str, Any]] = ContextVar("http_settings", default=MappingProxyType({}))

_POLL = 0.1  # seconds after which a waiting reader checks whether the engine still runs


class SpeculativeBatchingManager(ContinuousBatchingManager):
    """
    Manager with the interface of transformers', served by an engine. A request gets the tokens that `model.generate`
    gives it by itself, with the manager's generation config or the request's own arguments of `generate`.

    Args:
        model (`PreTrainedModel`): The target. It is put into evaluation mode, as by transformers.
        choice (`Choice`): The assistant. A default one is refused if requests cannot share forwards.
        options (`ContinuousBatchingConfig`, *optional*): Settings of memory and batches.
        hints (`WorkloadHints`, *optional*): The expected number of requests.
        is_cached (`bool`): Whether `stop` may keep the manager with the model, for the next session.

    Raises:
        ValueError, TypeError: for models that an engine does not serve, and assistants that cannot draft.
    """

    is_tp_driver = True
    model: Any
    generation_config: Any

    def __init__(
        self,
        model: PreTrainedModel,
        choice: Choice,
        options: ContinuousBatchingConfig | None = None,
        hints: Any = None,
        is_cached: bool = False,
    ):
        if getattr(model, "_device_mesh", None) is not None:
            raise ValueError("A model that is split over processes cannot be served with an `assistant`: leave it out.")
        self.model, self.assistant, self._is_cached = model, choice.assistant, is_cached
        self.continuous_batching_config = options or ContinuousBatchingConfig()
        was_training = model.training
        model.eval()
        try:
            way, reason = way_of(model)
            if choice.is_default and way != "packed":
                raise ValueError(f"Its requests cannot share forwards, since {reason}.")
            self.engine = _ManagedEngine(
                model, choice.assistant, **engine_options(model, self.continuous_batching_config, hints)
            )
        except BaseException:
            model.train(was_training)
            raise
        self.warmed_up = False
        self._lock = threading.Lock()
        self._local = threading.local()
        self._closer: threading.Thread | None = None
        self._why_stopping: str | None = None
        self._recorded = GenerationStatistics()

    def begin(self, config: GenerationConfig | None, seed: Any, settings: dict[str, Any]) -> None:
        """
        Begin a session with its own generation config, seeds and arguments of `generate`.

        Raises:
            ValueError, TypeError: for settings that cannot be served.
        """
        self.model.eval()
        self.generation_config = self.model.generation_config if config is None else config
        self.num_return_sequences = getattr(self.generation_config, "num_return_sequences", None) or 1
        self._settings, self._num_seeded = settings, 0
        self._seed = self.continuous_batching_config.seed if seed is None else seed
        if self._seed is not None:
            check_seed(self._seed)
        with without_defaults():
            self.engine.check_arguments(**self._arguments(1, 1))

    def drafts_with(self, assistant: Any) -> bool:
        """Return whether this is the manager's assistant."""
        return assistant is self.assistant or (isinstance(assistant, str | list) and assistant == self.assistant)

    # Requests

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> str | None:
        """
        Queue a request, and return its name. A request that cannot be served is answered with an error.

        Args:
            eos_token_id (`int` or list of `int`, *optional*): End tokens, by default those of the generation config;
                -1 for none.
            kwargs: Arguments of `generate` for this request alone (`temperature`, `seed`, `stop_strings` with
                `tokenizer`, `generation_config`, `assistant`, ...).

        Raises:
            ValueError: if the name is in use.
        """
        options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id, **kwargs}
        options |= {"streaming": streaming, "record_timestamps": record_timestamps, **http_settings.get()}
        return self._add([input_ids], request_id, **options)[0]

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Queue a request for each prompt, and return their names. If they sample, one seed yields all their seeds."""
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "streaming": streaming}
        options |= {"record_timestamps": record_timestamps, **kwargs}
        return self._add(inputs, **options)

    def _add(
        self, inputs: Sequence[Sequence[int]], request_id: str | None = None, seed: Any = None, **options: Any
    ) -> list[Any]:
        if reason := self.can_accept_new_requests():
            logger.warning(f"{reason} {len(inputs)} requests are dropped.")
            return [None] * len(inputs)
        seeds = iter(self._seeds(seed, len(inputs) * self.num_return_sequences, options))
        names = []
        for input_ids in inputs:
            names.append(self.engine.new_name() if request_id is None else request_id)
            copies = [f"{names[-1]}__child#{number}" for number in range(self.num_return_sequences - 1)]
            for name in [*copies, names[-1]]:
                self._submit(name, input_ids, next(seeds), options)
        return names

    def _submit(self, name: str, input_ids: Sequence[int], seed: int | None, options: dict[str, Any]) -> None:
        if name in self.engine.results:
            raise ValueError(f"`request_id` must be new, got {name!r}, which is in use.")
        logprobs = self.continuous_batching_config.return_logprobs
        try:
            arguments = self._arguments(len(input_ids), **options)
            with without_defaults():  # `generate` prepares it, and must not apply a default assistant
                self.engine.add_request(input_ids, name, seed=seed, logprobs=logprobs, **arguments)
        except (TypeError, ValueError) as error:
            logger.error(f"The request {name} cannot be served: {error}")
            output = EngineOutput(name, list(input_ids))
            self.engine.results.open(output)
            self.engine.results.put(failed(output, "error", str(error)))

    def _seeds(self, seed: Any, num_rows: int, options: dict[str, Any]) -> list[int | None]:
        """
        Return the seeds of requests, which are those of rows in one batch of `generate`: from a seed given for them, or
        from the session's, whose rows are numbered from its first request on.
        """
        first = 0
        if seed is None:
            seed = self._seed
            with self._lock:
                first = self._num_seeded
                self._num_seeded += num_rows
        config = options.get("generation_config") or self.generation_config
        if seed is None and options.get("do_sample", self._settings.get("do_sample", config.do_sample)):
            seed, first = broadcast_from_rank0(self.model, lambda: int(torch.randint(2**62, ()))), 0
        if seed is None:
            return [None] * num_rows
        check_seed(seed)
        if isinstance(seed, Sequence):
            if len(seed) < first + num_rows:
                raise ValueError(f"`seed` must be one integer or one per request: got {len(seed)}.")
            return [int(value) for value in seed[first : first + num_rows]]
        return [row_seed(int(seed), first + row) for row in range(num_rows)]

    def _arguments(
        self, num_tokens: int, max_new_tokens: int | None = None, eos_token_id: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the arguments of `Engine.add_request` for a prompt of `num_tokens`."""
        options = {**self._settings, **kwargs}
        config = options.pop("generation_config", None) or self.generation_config
        if max_new_tokens is None:
            max_new_tokens = config.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = self._most_new_tokens(num_tokens)
        return request_arguments(config, options, max_new_tokens, eos_token_id, self.engine.tokenizer)

    def _most_new_tokens(self, num_tokens: int) -> int:
        """Return the tokens that positions and memory leave to a prompt of `num_tokens` without a limit of its own."""
        positions, memory = model_limits(self.model).num_positions, self.engine.max_tokens
        limits = [item for item in (positions, memory and memory - DRAFT_ROOM) if item is not None]
        if not limits:
            raise ValueError("`max_new_tokens` must be given, since neither positions nor memory are bounded.")
        return max(min(limits) - num_tokens, 1)

    def cancel_request(self, request_id: str) -> None:
        """End a request early, without an output."""
        self.engine.cancel_request(request_id, discard=True)

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> EngineOutput | None:
        """
        Remove and return the next output of a request, or of any, finished or not. Return None after `timeout` seconds,
        or if no output will come.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            is_expected = self.is_running() and (request_id is None or self.engine.results.is_open(request_id))
            left = min(_POLL, end - time.monotonic()) if is_expected else 0.0
            output = self.engine.results.get(request_id, max(left, 0.0), unfinished=True)
            if output is not None or left <= 0:
                return output

    def __iter__(self) -> Iterator[EngineOutput]:
        while self.is_running():
            if (output := self.get_result(timeout=_POLL)) is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[EngineOutput]:  # type: ignore[override]
        return self.engine.request_id_iter(request_id)

    def register_result_handler(self, request_id: str, callback: Callable) -> None:
        """Pass the outputs of a request, which may be added later, to `callback` in the running event loop."""
        self.engine.results.deliver(request_id, callback)

    # Life

    @property
    def batch_processor(self) -> Any:  # type: ignore[override]
        """Return the view of requests that transformers' monitors read; None before `start` and after `stop`."""
        return _RequestView(self.engine) if self._closer is None and self.is_running() else None

    @property
    def background_thread_status(self) -> Any:  # type: ignore[override]
        """Return the manager itself, which has the members that transformers' server reads of the status."""
        return self

    @property
    def fatal_error(self) -> BaseException | None:
        """Return the error that has ended the engine's thread, if any."""
        return self.engine.fatal_error

    def can_accept_new_requests(self) -> str | None:
        """Return the reason why requests are dropped; None if they are accepted."""
        return self._why_stopping if self.fatal_error is None else "The engine has ended with an error."

    def warmup(self) -> None:
        """Do nothing: the engine captures no graphs beforehand."""
        self.warmed_up = True

    def is_running(self) -> bool:
        return self.engine.is_running

    def start(self) -> None:
        if self.is_running():
            logger.warning("The manager runs already.")
            return
        self._closer = self._why_stopping = None
        self.engine.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the engine as transformers does: after all requests have been served or, with `hard_stop`, at once."""
        if not self.is_running() and self._closer is None:
            logger.warning("The manager was not started.")
            return
        if getattr(self._local, "num_pauses", 0):
            raise RuntimeError("The manager cannot be stopped from inside a pause: leave the `pause` context first.")
        start = time.perf_counter()
        self._why_stopping = "The manager is stopping."
        self._closer = threading.Thread(
            target=self._close, args=(not hard_stop,), name="hf-smartspec stop", daemon=True
        )
        self._closer.start()
        if block:
            self.join(start, timeout)
        if keep_for_next_session and self._is_cached:
            state_of(self.model).manager = self

    def _close(self, drain: bool) -> None:
        self.engine.stop(drain=drain)
        with self._lock:
            now = replace(self.engine.statistics)
            new, self._recorded = now - self._recorded, now
        if new.generated_tokens:
            record_call(self.model, new)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        if self._closer is None:
            return
        self._closer.join(timeout)
        if self._closer.is_alive():
            logger.warning(f"The engine has not ended after {timeout} seconds.")

    def destroy(self) -> None:
        """Stop the engine for good, and free its memory."""
        if self.is_running():
            self.stop()
        self.engine.free()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause all requests, so that the model may be changed. Afterwards, their texts are computed anew."""
        if not self.is_running():
            raise RuntimeError("The manager does not run, so it cannot be paused.")
        with self.engine.pause():
            self._local.num_pauses = getattr(self._local, "num_pauses", 0) + 1
            try:
                yield
            finally:
                self._local.num_pauses -= 1


class _ManagedEngine(Engine):
    """Engine whose policy is borrowed from the model's state: later managers continue with its estimates."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._borrowed = ExitStack()
        super().__init__(*args, **kwargs)

    def _new_auction(self, cost: CostModel) -> GoodputAuction:
        return self._borrowed.enter_context(borrow_policy(self.model, self._assistant.source.name, cost))

    def free(self) -> None:
        """Free the engine's memory and return the policy, when the engine does not run."""
        self._memory.reset()
        self._borrowed.close()


class _RequestView(NamedTuple):
    """View of an engine's requests with members of transformers' batch processor and of its scheduler."""

    engine: Engine

    @property
    def scheduler(self) -> "_RequestView":
        return self

    @property
    def active_requests(self) -> dict[str, None]:
        return dict.fromkeys(self.engine.running)

    @property
    def waiting_requests(self) -> dict[str, None]:
        return dict.fromkeys(self.engine.waiting)

    def has_pending_requests(self) -> bool:
        return self.engine.results.is_open()
