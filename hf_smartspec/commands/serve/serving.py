"""Models, engines and application of `smartspec serve`."""

import argparse
import gc
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import quote

import torch
from transformers import PreTrainedModel

from ... import __version__
from ...online.distillation import OnlineDistillation
from ...replicas.sharing.outputs import SharedOutputs
from ...serving.memory.budget import Budget
from ...serving.server.app import Server, make_app
from ...serving.server.engine import ServedEngine
from ...serving.server.guard.hosts import local_hosts
from ...serving.server.guard.keys import ApiKeys, Caller
from ...serving.server.guard.limits import Limits
from ...serving.server.metrics import ServerMetrics
from ...serving.server.running import DrainingServer
from ...serving.server.served import ServedModel
from ..common.arguments import UsageError, usage_errors
from ..common.drafters import DrafterFiles
from ..common.models import dtype_to_load, load_model, load_tokenizer, use_quantized
from .learning import learning_draft, new_learning, sharing_of_learnt

_MIB = 2**20


def serve(
    args: argparse.Namespace,
    names: Mapping[str, str],
    keys: ApiKeys,
    listener: socket.socket,
    on_start: Callable[[], None],
) -> None:
    """Load models by name, and serve them until SIGTERM or Ctrl-C."""
    with loaded_server(args, names, keys, hosts_of(args.host, keys)) as server:
        DrainingServer(server.app, args.drain_seconds, on_start, args.log_level).serve_until_signal(listener)


@contextmanager
def loaded_server(
    args: argparse.Namespace, names: Mapping[str, str], keys: ApiKeys, hosts: Collection[str] | None = None
) -> Iterator[Server]:
    """Load models by name, start their engines, and yield the server."""
    limits = Limits(
        max_body_bytes=args.max_body_mib * _MIB,
        max_model_len=args.max_model_len,
        max_new_tokens=args.max_new_tokens,
        max_queue=args.max_queue,
        max_per_key=args.max_requests_per_key,
        timeout=args.timeout,
    )
    metrics = ServerMetrics()
    models: dict[str, ServedModel] = {}
    with ExitStack() as stack:
        for name, path in names.items():
            if args.learn:
                stack.enter_context(sharing_of_learnt(args, name))  # before the drafters take up what was learnt
            models[name] = served = load_served(args, name, path, limits, metrics, len(names), keys)
            if isinstance(online := served.engine.config.online, OnlineDistillation):
                stack.callback(online.close)
            stack.callback(served.stop)
        if args.shared:
            for name, served in models.items():
                stack.enter_context(_sharing(f"{args.shared}/{quote(name, safe='')}", served, args.shared_interval))
        print(f"smartspec serve: {memory_of(models)}", file=sys.stderr, flush=True)
        if args.learn:
            print(f"smartspec serve: what drafters learn is saved in {args.learn}", file=sys.stderr, flush=True)
        template_kwargs = args.chat_template_kwargs
        app = make_app(models, metrics, keys, limits.max_body_bytes, template_kwargs, __version__, hosts)
        # All that is loaded stays: garbage collections of it would stop all requests for tenths of a second at a time.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield Server(app, models)


@contextmanager
def _sharing(url: str, served: ServedModel, interval: float) -> Iterator[None]:
    """Let the model's suffix trees learn from other servers' outputs, too."""
    trees = served.engine.suffix_trees
    if not trees:
        raise UsageError(f"--shared: no suffix trees draft for {served.name}")
    with usage_errors("--shared"):
        shared = SharedOutputs(url, served.tokenizer, interval)
    with shared.attached(trees[0]):
        yield


def hosts_of(host: str, keys: ApiKeys) -> tuple[str, ...] | None:
    """
    Return the host names that requests may have: this machine's, where only it can reach a server without keys. A web
    page in its browsers could otherwise read answers under a name of its own (DNS rebinding).
    """
    return None if len(keys) else local_hosts(host)


def memory_of(models: Mapping[str, ServedModel]) -> str:
    """Return one line about the memory that models take at most, beside their weights."""
    engines = {name: served.engine for name, served in models.items()}
    texts = ", ".join(f"{engine.max_kv_bytes // _MIB:,} MiB for {name}" for name, engine in engines.items())
    trees = {id(tree): tree.max_bytes for engine in engines.values() for tree in engine.suffix_trees}
    stored = f"; texts to draft from: {sum(trees.values()) // _MIB:,} MiB (none with --assistant none)" if trees else ""
    return f"keys and values take at most {texts} (--max-kv-mib){stored}"


def num_sharing(args: argparse.Namespace, num_models: int) -> int:
    """
    Return the number of engines that share the memory of this machine, or of the GPU: every replica has one of each
    model. On a cluster, where the machine of a replica is not known, no replicas are taken to share one.
    """
    has_own = args.ray_address or torch.device(args.device).type == "cuda"
    return num_models if has_own else num_models * (args.max_replicas or args.replicas or 1)


def load_served(
    args: argparse.Namespace,
    name: str,
    path: str,
    limits: Limits,
    metrics: ServerMetrics,
    num_models: int = 1,
    keys: ApiKeys | None = None,
) -> ServedModel:
    """Return a model with its started engine."""
    model = load_model(path, dtype_to_load(path, args.dtype, args.quantize), args.device)
    use_quantized(model, args.quantize, args.dtype)
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise UsageError(f"the model {path!r} has no tokenizer, which a server needs")
    callers = [] if keys is None else keys.callers
    with usage_errors(name):
        engine = ServedEngine(
            model,
            _assistant(args, model, callers),
            max_batch_size=args.max_batch_size,
            max_kv_bytes=Budget(args.max_kv_mib and args.max_kv_mib * _MIB, num_sharing(args, num_models)),
            max_prefill_tokens=args.max_prefill_tokens,
            tokenizer=tokenizer,
            online=new_learning(args, name, callers) if args.learn else None,
        )
        served = ServedModel(name, engine, limits, metrics, args.max_batch_size)
    engine.start()
    return served


def _assistant(args: argparse.Namespace, model: PreTrainedModel, callers: Sequence[Caller]) -> Any:
    sources: list[Any] = list(args.assistant)
    if args.draft:
        draft: Any = DrafterFiles(model, option="--draft").loaded(args.draft)
        if args.learn and callers:
            if not isinstance(draft, PreTrainedModel):
                raise UsageError(
                    f"--learn: keys are kept apart by copies of a draft model, and {args.draft!r} is learned heads: "
                    "name it in --assistant, with --learn-tenants together and without --no-learn-key-file"
                )
            draft = learning_draft(draft, callers, args.learn_tenants)
        sources = [*(item for item in sources if item != "none"), draft]
    return sources[0] if len(sources) == 1 else sources
