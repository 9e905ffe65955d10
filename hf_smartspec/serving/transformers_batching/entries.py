"""Calls of an enabled model's continuous batching: which assistant they get, and who serves them."""

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


class _Asked(NamedTuple):
    """
    What a call of a method asks for that transformers does not hand on to those that it calls.

    Args:
        choice (`Choice`): What drafts.
        seed (`int` or sequence of `int`, *optional*): For the requests in the order in which they come.
        settings (`dict`): Arguments of `generate` for all requests.
    """

    choice: Choice
    seed: int | Sequence[int] | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012  # nobody writes into it


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


def generate_batch(call: EnabledCall) -> Any:
    """
    transformers' `generate_batch`, whose manager is ours where something drafts. Further arguments of `generate`
    (`temperature`, `tokenizer`, ...), which transformers ignores, then count.
    """
    assistant, seed = call.take()
    given = _GENERATE_BATCH.bind_partial(call.model, *call.args, **call.kwargs).arguments
    settings = dict(given.get("kwargs", {}))
    settings.pop("max_new_tokens", None)  # reaches the requests
    asked = _ask(call, assistant, seed, given.get("generation_config"), settings)
    if asked is None:
        return call.plain()
    if seed is not None and not isinstance(seed, int):
        config = given.get("generation_config") or call.model.generation_config
        num_rows = len(given.get("inputs", ())) * (getattr(config, "num_return_sequences", None) or 1)
        row_seeds(seed, num_rows, do_sample=True)  # refuses another number of them
    with _asking(asked):
        return call.original(*call.args, **{name: value for name, value in call.kwargs.items() if name not in settings})


@contextmanager
def continuous_batching_context_manager(call: EnabledCall) -> Iterator[Any]:
    """transformers' context manager, with a manager of ours where something drafts."""
    assistant, seed = call.take()
    config = call.kwargs.get("generation_config", call.args[0] if call.args else None)
    asked = None if assistant is None and seed is None else _ask(call, assistant, seed, config)
    with ExitStack() as stack:
        with _asking(asked or _asked.get()):
            manager = stack.enter_context(call.plain())
        yield manager


def init_continuous_batching(call: EnabledCall) -> Any:
    """A manager of ours where something drafts, else transformers'."""
    model = call.model
    assistant, seed = call.take()
    given = _INIT.bind(model, *call.args, **call.kwargs).arguments
    config = given.get("generation_config")
    asked = None if assistant is not None or seed is not None else _asked.get()
    asked = asked or _ask(call, assistant, seed, config)
    if asked is None:
        return _plain(call)
    try:
        return _manager(model, asked, config, given.get("continuous_batching_config"), given.get("workload_hints"))
    except (OSError, TypeError, ValueError) as error:
        if not asked.choice.is_default:
            raise
        logger.warning(f"Continuous batching of {type(model).__name__} is left to transformers: {error}")
        return _plain(call)


def destroy_cached_manager(call: EnabledCall) -> None:
    """Ours goes too."""
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
    with without_defaults():  # a default of all models' has had its turn
        return call.plain()


def _ask(
    call: EnabledCall, assistant: Any, seed: Any, config: Any, settings: dict[str, Any] | None = None
) -> _Asked | None:
    """None where nothing drafts and no seed is given: then the call is transformers'."""
    choice = choose(call, assistant, config)
    if choice.assistant is None:
        if seed is None:
            return None
        choice = Choice("none")
    elif seed is not None:
        choice = Choice(choice.assistant)  # transformers, to which a default gives way, knows no seeds
    return _Asked(choice, seed, settings or {})


@contextmanager
def _asking(asked: _Asked | None) -> Iterator[None]:
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def _manager(model: PreTrainedModel, asked: _Asked, config: Any, options: Any, hints: Any) -> Any:
    """A new manager, or that which was kept from an earlier session with the same assistant."""
    known = state_of(model).manager
    if known is not None and known.drafts_with(asked.choice.assistant):
        manager = known
    else:
        destroy_manager(model)
        manager = SpeculativeBatchingManager(model, asked.choice, options, hints, is_cached=True)
    manager.begin(config, asked.seed, asked.settings)
    return manager
