"""transformers' `ContinuousBatchingManager`, with an engine that speculates inside."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedModel

from ...decoding.call import DRAFT_ROOM
from ...decoding.statistics import GenerationStatistics, record_call
from ...log import get_logger
from ...prepare.call import model_limits
from ...prepare.entry import Choice, without_defaults
from ...prepare.route import way_of
from ...sampling.noise import row_seed
from ...target_model.compat import GenerationOutput, RequestStatus
from ...target_model.forward.ranks import broadcast_from_rank0
from ...target_model.model_state import state_of
from ...validate import check_seed
from .engine import ManagedEngine, Processor
from .settings import engine_options, num_cached_tokens, request_arguments

logger = get_logger(__name__)


class SpeculativeBatchingManager(ContinuousBatchingManager):
    """
    Stands where transformers' manager stands, and does what its methods say. Each request gets the tokens that
    `model.generate` gives it by itself, with the manager's generation config, or with what `add_request` says of it:
    anything that `generate` takes for one prompt.

    Args:
        model (`PreTrainedModel`): Is put into evaluation mode, as by transformers' own.
        choice (`Choice`): What drafts; a default does not go with forwards that requests do not share.
        options (`ContinuousBatchingConfig`, *optional*): Of memory and batches.
        hints (`WorkloadHints`, *optional*): How many requests there will be.
        is_cached (`bool`): Whether `stop` may keep the manager with the model, for the next session.

    Raises:
        ValueError, TypeError: for models that an engine does not serve, and assistants that cannot draft.
    """

    is_tp_driver = True
    model: Any
    generation_config: Any
    background_thread_status: Any

    def __init__(
        self,
        model: PreTrainedModel,
        choice: Choice,
        options: ContinuousBatchingConfig | None = None,
        hints: Any = None,
        is_cached: bool = False,
    ):
        if getattr(model, "_device_mesh", None) is not None:
            raise ValueError(
                "Weights that are spread over processes cannot be served with an `assistant`: leave it out."
            )
        self.model, self.assistant, self._is_cached = model, choice.assistant, is_cached
        self.continuous_batching_config = options or ContinuousBatchingConfig()
        was_training = model.training
        model.eval()
        try:
            way, reason = way_of(model)
            if choice.is_default and way != "packed":
                raise ValueError(f"Its requests cannot share forwards, since {reason}.")
            found: dict[str, Any] = {"returns_logprobs": self.continuous_batching_config.return_logprobs}
            found |= engine_options(model, self.continuous_batching_config, hints)
            self.engine = ManagedEngine(
                model, choice.assistant, num_cached_tokens(self.continuous_batching_config), **found
            )
        except BaseException:
            model.train(was_training)
            raise
        self.background_thread_status = _ThreadStatus(self.engine)
        self.warmed_up = False
        self._lock = threading.Lock()
        self._request_counter = 0
        self._local = threading.local()
        self._closer: threading.Thread | None = None
        self._recorded = GenerationStatistics()
        self.generation_config, self.num_return_sequences = model.generation_config, 1
        self._settings: dict[str, Any] = {}
        self._seed: int | Sequence[int] | None = None
        self._num_rows = 0  # that were seeded

    def begin(self, config: GenerationConfig | None, seed: Any, settings: dict[str, Any]) -> None:
        """
        A session begins, with a generation config, seeds and settings of its own.

        Raises:
            ValueError, TypeError: for what cannot be served.
        """
        self.model.eval()
        self.generation_config = self.model.generation_config if config is None else config
        self.num_return_sequences = getattr(self.generation_config, "num_return_sequences", None) or 1
        self._settings, self._num_rows = settings, 0
        self._seed = self.continuous_batching_config.seed if seed is None else seed
        if self._seed is not None:
            check_seed(self._seed)
        with without_defaults():
            self.engine.check(self._arguments(1, 1, None, {}))

    def drafts_with(self, assistant: Any) -> bool:
        """Whether that is what drafts here."""
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
        Queues a request, and returns its name. One that cannot be served is answered with an error.

        Args:
            eos_token_id (`int` or list of `int`, *optional*): That of the generation config where not given; -1: none.
            kwargs: Of `generate`, for this request alone (`temperature`, `seed`, `stop_strings` with `tokenizer`,
                `generation_config`, `assistant`, ...).

        Raises:
            ValueError: for the name of a request that runs.
        """
        return self._add([input_ids], request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, kwargs)[0]

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """`add_request` for each prompt. Where they sample, it is with one seed, from which each derives its own."""
        eos_token_id = kwargs.pop("eos_token_id", None)
        return self._add(inputs, None, max_new_tokens, streaming, record_timestamps, eos_token_id, kwargs)

    def _add(
        self,
        inputs: Sequence[Sequence[int]],
        request_id: str | None,
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: int | list[int] | None,
        kwargs: dict[str, Any],
    ) -> list[Any]:
        if reason := self.background_thread_status.can_accept_new_requests():
            logger.warning(f"{reason} {len(inputs)} requests are dropped.")
            return [None] * len(inputs)
        seed = kwargs.pop("seed", None)
        seeds = self._seeds(seed, len(inputs) * self.num_return_sequences, kwargs)
        names = []
        for place, input_ids in enumerate(inputs):
            name = self._new_name() if request_id is None else request_id
            names.append(name)
            copies = [f"{name}__child#{number}" for number in range(self.num_return_sequences - 1)]
            for row, own in enumerate([*copies, name], place * self.num_return_sequences):
                self._submit(
                    own, input_ids, max_new_tokens, eos_token_id, seeds[row], kwargs, streaming, record_timestamps
                )
        return names

    def _new_name(self) -> str:
        with self._lock:
            self._request_counter += 1
            return f"req_{self._request_counter - 1}"

    def _seeds(self, seed: Any, num_rows: int, kwargs: dict[str, Any]) -> list[int | None]:
        """
        The seeds of rows, as those of a batch of `generate`: from one seed that was given for them, or from that of the
        session, in which they go on behind those that were there before.
        """
        first = 0
        if seed is None:
            seed = self._seed
            with self._lock:
                first = self._num_rows
                self._num_rows += num_rows
        config = kwargs.get("generation_config") or self.generation_config
        if seed is None and kwargs.get("do_sample", self._settings.get("do_sample", config.do_sample)):
            seed, first = broadcast_from_rank0(self.model, lambda: int(torch.randint(2**62, ()))), 0
        if seed is None:
            return [None] * num_rows
        check_seed(seed)
        if isinstance(seed, Sequence):
            if len(seed) < first + num_rows:
                raise ValueError(f"`seed` must be one integer or one per request: got {len(seed)}.")
            return [int(value) for value in seed[first : first + num_rows]]
        return [row_seed(int(seed), first + row) for row in range(num_rows)]

    def _submit(
        self,
        name: str,
        input_ids: Sequence[int],
        max_new_tokens: int | None,
        eos_token_id: int | list[int] | None,
        seed: int | None,
        kwargs: dict[str, Any],
        streaming: bool,
        record_timestamps: bool,
    ) -> None:
        if name in self.engine:
            raise ValueError(f"`request_id` must be new, got {name!r}, which is in use.")
        try:
            arguments = self._arguments(len(input_ids), max_new_tokens, eos_token_id, kwargs)
            with without_defaults():  # `generate` prepares it, and has no default of its own here
                self.engine.add_request(
                    input_ids, name, streaming=streaming, record_timestamps=record_timestamps, seed=seed, **arguments
                )
        except (TypeError, ValueError) as error:
            logger.error(f"The request {name} cannot be served: {error}")
            output = GenerationOutput(name, list(input_ids), error=str(error), status=RequestStatus.FAILED)
            self.engine.deliveries.put(output)

    def _arguments(
        self, num_tokens: int, max_new_tokens: int | None, eos_token_id: int | list[int] | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        options = {**self._settings, **kwargs}
        config = options.pop("generation_config", None) or self.generation_config
        max_new_tokens = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = self._most_new_tokens(num_tokens)
        return request_arguments(config, options, max_new_tokens, eos_token_id, self.engine.tokenizer)

    def _most_new_tokens(self, num_tokens: int) -> int:
        """What positions and memory leave to a prompt of so many tokens, where nobody sets a limit."""
        positions, memory = model_limits(self.model).num_positions, self.engine.max_tokens
        limits = [item for item in (positions, memory and memory - DRAFT_ROOM) if item is not None]
        if not limits:
            raise ValueError("`max_new_tokens` must be given: neither positions nor memory set an end.")
        return max(min(limits) - num_tokens, 1)

    def cancel_request(self, request_id: str) -> None:
        """Ends a request. Nobody gets its output but a handler that was registered for it."""
        self.engine.cancel_request(request_id)

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output there is, or the next of a request; None after `timeout` seconds, or if none is to come."""
        return self.engine.deliveries.get(request_id, timeout, lambda: not self.is_running())

    def __iter__(self) -> Iterator[GenerationOutput]:
        while self.is_running():
            if (output := self.get_result(timeout=0.1)) is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:  # type: ignore[override]
        while True:
            output = self.get_result(request_id, timeout=0.1)
            if output is None and not (self.is_running() and request_id in self.engine):
                output = self.get_result(request_id, timeout=0)
                if output is None:
                    return
            if output is not None:
                yield output
                if output.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable) -> None:
        """`callback` gets every output of the request, in the event loop that runs; before or after it is added."""
        self.engine.deliveries.register(request_id, callback)

    # Life

    @property
    def batch_processor(self) -> Any:  # type: ignore[override]
        """What waits and runs, to look at; None before `start` and after `stop`."""
        return Processor(self.engine) if self._closer is None and self.is_running() else None

    def warmup(self) -> None:
        """There is nothing to be captured beforehand."""
        self.warmed_up = True

    def is_running(self) -> bool:
        return self.engine.is_running

    def start(self) -> None:
        if self.is_running():
            logger.warning("The manager runs already.")
            return
        self._closer = self.background_thread_status.stops = None
        self.engine.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """As transformers': requests are served to their end first, unless it is `hard_stop`."""
        if not self.is_running() and self._closer is None:
            logger.warning("The manager was not started.")
            return
        if getattr(self._local, "num_pauses", 0):
            raise RuntimeError("The manager cannot be stopped from inside a pause: leave the `pause` context first.")
        start = time.perf_counter()
        self.background_thread_status.stops = "The manager is stopping."
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
        """Stops it for good, and frees its memory."""
        if self.is_running():
            self.stop()
        self.engine.free()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing runs within, so that the model may be changed; texts are then computed anew."""
        if not self.is_running():
            raise RuntimeError("The manager does not run, and cannot be paused.")
        with self.engine.pause():
            self._local.num_pauses = getattr(self._local, "num_pauses", 0) + 1
            try:
                yield
            finally:
                self._local.num_pauses -= 1


class _ThreadStatus:
    """Of the engine's thread, as transformers' server asks for it."""

    def __init__(self, engine: ManagedEngine):
        self._engine = engine
        self.stops: str | None = None  # why no further requests are taken

    @property
    def fatal_error(self) -> BaseException | None:
        return self._engine.fatal_error

    def can_accept_new_requests(self) -> str | None:
        """Why not, if so."""
        return self.stops if self.fatal_error is None else "The engine has died of an error."
