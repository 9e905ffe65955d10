"""Methods of continuous batching of enabled models: choose the assistant, and an engine or transformers."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from transformers import GenerationMixin, PreTrainedModel

from ...log import get_logger
from ...prepare.call import row_seeds
from ...prepare.entry import Choice, EnabledCall, choose, without_defaults
from ...target_model.model_state import state_of
from .manager import SpeculativeBatchingManager

logger = get_logger(__name__)

_GENERATE_BATCH = inspect.signature(GenerationMixin.generate_batch)
_INIT = inspect.signature(GenerationMixin.init_continuous_batching)


class _Options(NamedTuple):
    """
    Options of a call that transformers does not pass on to the methods that it calls.

    Args:
        choice (`Choice`): The assistant.
        seed (`int` or sequence of `int`, *optional*): One seed, or one per request in the order of arrival.
        settings (`dict`): Arguments of `generate` for all requests.
    """

    choice: Choice
    seed: int | Sequence[int] | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012  # never written to


_current: ContextVar[_Options | None] = ContextVar("options", default=None)


def generate_batch(call: EnabledCall) -> Any:
    """
    Call transformers' `generate_batch`, with a manager of ours if an assistant or a seed is given. Further arguments of
    `generate` (`temperature`, `tokenizer`, ...) then count, which transformers ignores.
    """
    assistant, seed = call.take()
    given = _GENERATE_BATCH.bind_partial(call.model, *call.args, **call.kwargs).arguments
    settings = dict(given.get("kwargs", {}))
    settings.pop("max_new_tokens", None)  # transformers passes it on to the requests
    options = _options_of(call, assistant, seed, given.get("generation_config"), settings)
    if options is None:
        return call.plain()
    if seed is not None and not isinstance(seed, int):
        config = given.get("generation_config") or call.model.generation_config
        num_rows = len(given.get("inputs", ())) * (getattr(config, "num_return_sequences", None) or 1)
        row_seeds(seed, num_rows, do_sample=True)  # raises for another number of seeds
    with _set_options(options):
        return call.original(*call.args, **{name: value for name, value in call.kwargs.items() if name not in settings})


@contextmanager
def continuous_batching_context_manager(call: EnabledCall) -> Iterator[Any]:
    """Return transformers' context manager, with a manager of ours if an assistant or a seed is given."""
    assistant, seed = call.take()
    config = call.kwargs.get("generation_config", call.args[0] if call.args else None)
    options = None if assistant is None and seed is None else _options_of(call, assistant, seed, config)
    with ExitStack() as stack:
        with _set_options(options or _current.get()):
            manager = stack.enter_context(call.plain())
        yield manager


def init_continuous_batching(call: EnabledCall) -> Any:
    """Return a manager of ours if an assistant or a seed is given, else transformers'."""
    model = call.model
    assistant, seed = call.take()
    given = _INIT.bind(model, *call.args, **call.kwargs).arguments
    config = given.get("generation_config")
    options = None if assistant is not None or seed is not None else _current.get()
    options = options or _options_of(call, assistant, seed, config)
    if options is None:
        return _plain(call)
    try:
        return _manager(model, options, config, given.get("continuous_batching_config"), given.get("workload_hints"))
    except (OSError, TypeError, ValueError) as error:
        if not options.choice.is_default:
            raise
        logger.warning(f"Continuous batching of {type(model).__name__} is left to transformers: {error}")
        return _plain(call)


def destroy_cached_manager(call: EnabledCall) -> None:
    """Destroy the cached managers, transformers' and ours."""
    destroy_manager(call.model)
    call.plain()


def destroy_manager(model: PreTrainedModel) -> None:
    """Stop a manager that is kept for the next session, and free its memory."""
    state = state_of(model)
    with state.lock:
        manager, state.manager = state.manager, None
    if manager is not None:
        manager.destroy()


def _plain(call: EnabledCall) -> Any:
    with without_defaults():  # the default assistant of all models has been considered already
        return call.plain()


def _options_of(
    call: EnabledCall, assistant: Any, seed: Any, config: Any, settings: dict[str, Any] | None = None
) -> _Options | None:
    """Return the options of a call; None without assistant and seed, when transformers serves it."""
    choice = choose(call, assistant, config)
    if choice.assistant is None:
        if seed is None:
            return None
        choice = Choice("none")
    elif seed is not None:
        choice = Choice(choice.assistant)  # not a default, which could be left to transformers, which takes no seeds
    return _Options(choice, seed, settings or {})


@contextmanager
def _set_options(options: _Options | None) -> Iterator[None]:
    token = _current.set(options)
    try:
        yield
    finally:
        _current.reset(token)


def _manager(model: PreTrainedModel, options: _Options, config: Any, batching: Any, hints: Any) -> Any:
    """Return the manager kept from an earlier session, if its assistant is the same, or a new one."""
    known = state_of(model).manager
    if known is not None and known.drafts_with(options.choice.assistant):
        manager = known
    else:
        destroy_manager(model)
        manager = SpeculativeBatchingManager(model, options.choice, batching, hints, is_cached=True)
    manager.begin(config, options.seed, options.settings)
    return manager
