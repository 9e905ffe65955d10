"""transformers' server under the same load, by itself and with an assistant."""

import argparse
import importlib
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import demo_folder, load_tokenizer
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.generate import enable, enabled
from hf_smartspec.serving.transformers_batching.server import own_settings

from ...kit.session import Case
from ...kit.tables import Row

PLAIN = "transformers"
_NUM_CHECKED = 8  # requests that are also decoded alone
_PAGE, _MOST_PER_STEP = 256, 512  # tokens: of a page, as ever in transformers, and of a step
_SECONDS_TO_START = 300.0
_TEMPERATURES = (0.7, 0.0, 1.0, 0.5)
_STOPS = (None, None, ["\n\n"], None, ["."])


class _Answer(NamedTuple):
    text: str
    num_tokens: int
    seconds: float


def servers(setup: Setup, args: argparse.Namespace) -> Iterator[Case]:
    """
    Yield each server, which answers the same requests of mixed temperatures, seeds and stop strings; the model samples
    where the temperature is not 0.

    Raises:
        UsageError: if the server is not installed, or the model has no tokenizer.
    """
    for package in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(package) is None:
            raise UsageError('--serve: pip install "transformers[serving]"')
    tokenizer = load_tokenizer(args.model or str(demo_folder("--model") / "models" / "target"))
    if tokenizer is None:
        raise UsageError(f"--model: {args.model!r} has no tokenizer, which --serve needs")
    prompts = [str(tokenizer.decode(prompt)) for prompt in setup.prompts]
    texts = [prompts[number % len(prompts)] for number in range(args.requests)]
    requests = [_request(text, number, setup.max_new_tokens) for number, text in enumerate(texts)]
    with TemporaryDirectory() as folder:
        _save(setup.model, tokenizer, folder)
        for name in (PLAIN, args.assistant):
            yield Case(name, partial(_measured, setup.model, tokenizer, folder, name, requests, args))


def _measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    name: str,
    requests: Sequence[dict[str, Any]],
    args: argparse.Namespace,
) -> Row:
    with _server(folder, name, args) as client:
        client.completions.create(model=folder, **_request("1 2 3", 1, 4))  # what the first one brings about

        def ask(request: dict[str, Any]) -> _Answer:
            start = time.perf_counter()
            answer = client.completions.create(model=folder, **request)
            return _Answer(answer.choices[0].text, answer.usage.completion_tokens, time.perf_counter() - start)

        start = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(ask, requests))
        seconds = time.perf_counter() - start
    checked = list(zip(requests, answers))[:_NUM_CHECKED]
    return {
        "seconds": seconds,
        "tokens_per_second": sum(item.num_tokens for item in answers) / seconds,
        "median_latency": median(item.seconds for item in answers),
        "as_asked": sum(item.text == _alone(model, tokenizer, request) for request, item in checked),
        "num_checked": len(checked),
    }


def _request(prompt: str, number: int, max_tokens: int) -> dict[str, Any]:
    """Return arguments of the client's `completions.create`."""
    request: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "seed": number}
    request["temperature"] = _TEMPERATURES[number % len(_TEMPERATURES)]
    if stop := _STOPS[number % len(_STOPS)]:
        request["stop"] = stop
    return request


def check_can_be_saved(model: PreTrainedModel) -> None:
    """
    Refuse models that cannot be saved: servers read theirs from a folder.

    Raises:
        UsageError: for sizes that no config has, as enlarged models may have.
    """
    try:
        model.config.validate()
    except StrictDataclassError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UsageError(f"--serve: the target cannot be saved ({reason}): give --parameters another number") from error


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    config: Any = model.generation_config
    before, config.do_sample = config.do_sample, True
    try:
        model.save_pretrained(folder)
    finally:
        config.do_sample = before
    tokenizer.save_pretrained(folder)


@contextmanager
def _server(folder: str, name: str, args: argparse.Namespace) -> Iterator[Any]:
    """Yield a client of transformers' server, which ends with the block and has room for all clients' texts at once."""
    num_blocks = args.clients * -(-2 * (args.max_prompt + args.max_new_tokens) // _PAGE)
    serve: Any = importlib.import_module("transformers.cli.serve").Serve
    openai = importlib.import_module("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        if name != PLAIN:
            stack.enter_context(enable(assistant=name))
            stack.enter_context(own_settings())
        server = serve(
            folder, continuous_batching=True, host="127.0.0.1", port=port, device=args.device, dtype=args.dtype,
            log_level="error", non_blocking=True, cb_num_blocks=num_blocks, cb_max_batch_tokens=_MOST_PER_STEP,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + _SECONDS_TO_START
            while not server.server.started:
                if time.monotonic() > deadline:
                    raise UsageError("--serve: transformers' server does not start")
                time.sleep(0.05)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=3600)
        finally:
            server.kill_server()


def _alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: dict[str, Any]) -> str:
    """Return the answer of `generate` to a request."""
    ids: Any = tokenizer(request["prompt"], return_tensors="pt").input_ids.to(model.device)
    options: dict[str, Any] = {"do_sample": request["temperature"] > 0, "max_new_tokens": request["max_tokens"]}
    if options["do_sample"]:
        options |= {"temperature": request["temperature"], "seed": request["seed"]}
    if "stop" in request:
        options |= {"stop_strings": request["stop"], "tokenizer": tokenizer}
    with enabled(model):
        function: Any = model.generate
        found = function(ids, attention_mask=torch.ones_like(ids), assistant="none", **options)
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
