"""`smartspec serve --learn`: which copy of the draft model learns from whose requests, and where it is saved."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

from transformers import PreTrainedModel

from ...candidates import RoutedCandidates
from ...online.distillation import OnlineDistillation
from ...online.options import LearningOptions
from ...replicas.sharing.checkpoints import SharedCheckpoints
from ...serving.server.guard.keys import Caller
from ..common.arguments import usage_errors

_TOGETHER, _AS_LOADED = "together", "as loaded"  # copies of the draft model; further ones have namespaces as names


def learning_draft(draft: PreTrainedModel, callers: Sequence[Caller], tenants: str) -> RoutedCandidates:
    """
    Return copies of a draft model that draft and learn in its place: each drafts for the tenants that taught it, and
    for no others.

    Args:
        callers (sequence of `Caller`): The callers that have keys.
        tenants (`str`): "apart" gives each key a copy of its own, "together" one to all. Keys from which nothing is
            learnt share a copy that stays as it was loaded.
    """
    copies = {caller.namespace: _copy_of(caller, tenants) for caller in callers}
    drafters = {name: copy.deepcopy(draft) for name in dict.fromkeys(copies.values())}
    for name, drafter in drafters.items():  # by which `OnlineDistillation` names what it saves
        drafter.name_or_path = f"{Path(draft.name_or_path or 'draft').name}-{name}"
    return RoutedCandidates(drafters, labels=copies)


def _copy_of(caller: Caller, tenants: str) -> str:
    if not caller.teaches:
        return _AS_LOADED
    return _TOGETHER if tenants == "together" else caller.namespace


def new_learning(args: Any, name: str, callers: Sequence[Caller]) -> OnlineDistillation:
    """
    Return what trains the drafters of one model; each copy that learns has an equal part of the memory of samples.

    Raises:
        ValueError: if nothing is left for each of so many copies.
    """
    most = LearningOptions.of(**args.learn_options).max_bytes
    num_copies = max(len({_copy_of(caller, args.learn_tenants) for caller in callers if caller.teaches}), 1)
    if most < num_copies:
        raise ValueError(f"--learn-options: `max_bytes` {most} is too little for {num_copies} copies that learn.")
    options = args.learn_options | {"max_bytes": most // num_copies}
    return OnlineDistillation(checkpoint=_folder(args, name), **options)


def sharing_of_learnt(args: Any, name: str) -> AbstractContextManager[None]:
    """Return the exchange of learnt weights with other servers, by `--shared`."""
    if not args.shared:
        return nullcontext()
    with usage_errors("--shared"):
        shared = SharedCheckpoints(
            f"{args.shared}/{quote(name, safe='')}/learnt", _folder(args, name), args.shared_interval
        )
    return shared.attached()


def _folder(args: Any, name: str) -> Path:
    return Path(args.learn) / quote(name, safe="")
