"""What commands need of an `Engine`, for models that an engine cannot serve."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from ....decoding.statistics import GenerationStatistics
from ....generate import enable
from ....serving.outputs import EngineOutput, Results, failed
from ....serving.prompts import prompt_ids
from ....target.compat import RequestStatus
from ..runs import eos_ids


class GenerateEngine:
    """
    Serves requests one after another by `model.generate(assistant=...)`, in a thread of its own: whatever
    `generate` serves, encoder-decoders and state-space models among it. Methods as those of `Engine`.
    """

    def __init__(self, model: PreTrainedModel, assistant: Any, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer, self._assistant = enable(model), tokenizer, assistant
        self.statistics = GenerationStatistics()
        self._results, self._thread = Results(), ThreadPoolExecutor(1, "smartspec generate")
        self._cancelled: set[str] = set()
        self._num_requests = 0

    def __enter__(self) -> "GenerateEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(drain=False)

    def add_request(
        self, input_ids: Any, max_new_tokens: int | None = None, streaming: bool = False, seed: int | None = None,
        **kwargs: Any,
    ) -> str:  # fmt: skip
        """See `Engine.add_request`."""
        ids = prompt_ids(input_ids, self.tokenizer)
        name = f"req_{self._num_requests}"
        self._num_requests += 1
        output = EngineOutput(name, ids[0].tolist(), created_time=time.perf_counter())
        self._results.open(output)
        if max_new_tokens is not None:
            kwargs["max_new_tokens"] = max_new_tokens
        self._thread.submit(self._serve, output, ids, streaming, {"seed": seed, **kwargs})
        return name

    def request_id_iter(self, request_id: str) -> Iterator[EngineOutput]:
        """See `Engine.request_id_iter`."""
        return self._results.stream(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> EngineOutput | None:
        """See `Engine.get_result`."""
        return self._results.get(request_id, timeout)

    def cancel_request(self, request_id: str) -> None:
        """It ends at its next token."""
        self._cancelled.add(request_id)

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """See `Engine.stop`."""
        if drain:
            self._results.wait_until_answered(timeout)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _serve(self, output: EngineOutput, ids: torch.Tensor, is_streaming: bool, kwargs: dict[str, Any]) -> None:
        output.lifespan, output.status = (time.perf_counter(), -1), RequestStatus.DECODING
        ending = _Ending(lambda: output.request_id in self._cancelled)
        streamer = _Streamer(self._results, output, is_streaming)
        try:
            found = self._generate(ids, kwargs, ending, streamer)
        except Exception as error:  # of many kinds, all this request's
            self._results.put(failed(replace(output), "error", str(error) or repr(error)))
            return
        self._results.put(self._finished(streamer, found, kwargs, ending))

    def _generate(self, ids: torch.Tensor, kwargs: dict[str, Any], ending: "_Ending", streamer: BaseStreamer) -> Any:
        ids = ids.to(self.model.device)
        tokenizer = {"tokenizer": self.tokenizer} if kwargs.get("stop_strings") else {}
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant=self._assistant, streamer=streamer,
            stopping_criteria=StoppingCriteriaList([ending]), return_dict_in_generate=True, **tokenizer, **kwargs,
        )  # fmt: skip

    def _finished(
        self, streamer: "_Streamer", found: Any, kwargs: dict[str, Any], ending: "_Ending"
    ) -> EngineOutput:  # fmt: skip
        output = streamer.snapshot()
        now, tokens = time.perf_counter(), output.generated_tokens
        # Models that cannot speculate are decoded plainly, and return transformers' own output.
        statistics = getattr(found, "statistics", None) or GenerationStatistics(
            steps=len(tokens), generated_tokens=len(tokens), seconds_total=now - output.lifespan[0]
        )
        self.statistics = self.statistics + statistics
        output = replace(output, statistics=statistics, lifespan=(output.lifespan[0], now))
        if ending.is_called_for:
            return failed(output, "cancelled", "the request was cancelled")
        is_full = len(tokens) == kwargs.get("max_new_tokens") and tokens[-1] not in eos_ids(self.model)
        output.status, output.finish_reason = RequestStatus.FINISHED, "length" if is_full else "stop"
        return output


class _Ending(StoppingCriteria):
    """Ends the text once it is to be cancelled."""

    def __init__(self, is_cancelled: Any):
        self._is_cancelled, self.is_called_for = is_cancelled, False

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.is_called_for = self._is_cancelled()
        ends: Any = torch.full((len(input_ids),), self.is_called_for, dtype=torch.bool, device=input_ids.device)
        return ends


class _Streamer(BaseStreamer):
    """Hands out what there is of an output, without the prompt, which comes first."""

    def __init__(self, results: Results, output: EngineOutput, is_streaming: bool):
        self._results, self._output, self._is_streaming = results, output, is_streaming
        self._tokens: list[int] = []
        self._has_prompt = False
        self._lock = threading.Lock()

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        with self._lock:
            self._tokens += _flat(value)
            if self._output.first_token_time is None:
                self._output.first_token_time = time.perf_counter()
        if self._is_streaming:
            self._results.put(self.snapshot())

    def end(self) -> None:
        pass

    def snapshot(self) -> EngineOutput:
        with self._lock:
            return replace(self._output, generated_tokens=list(self._tokens))


def _flat(value: torch.Tensor) -> Sequence[int]:
    return value.reshape(-1).tolist()
