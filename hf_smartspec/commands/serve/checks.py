"""Checks of the arguments of `smartspec serve`, before anything is loaded."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from ...prepare.checks import check_assistant
from ...prepare.presets import EARLY_EXIT, is_preset
from ...target_model.private import TRANSFORMERS
from ..common.arguments import UsageError, usage_errors
from ..common.models import demo_folder, use_machine
from ..common.names import parts_of
from ..common.ray_cluster import check_ray

if TYPE_CHECKING:
    from ...serving.server.guard.keys import ApiKeys

EXTRAS = ("fastapi", "uvicorn", "openai", "prometheus_client", "llguidance")
OLDEST = "5.23"  # oldest transformers, whose handlers the server uses: as in the extra "serve"


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `UsageError` for missing packages, an unusable device and arguments that exclude one another."""
    check_extras()
    use_machine(args)
    args.assistant = [item for name in args.assistant for item in parts_of(name)]
    with usage_errors("--assistant"):
        check_assistant(args.assistant)
    _check_learning(args)
    if args.replicas:
        check_ray()
        if args.max_replicas is not None and args.max_replicas < args.replicas:
            raise UsageError(f"--max-replicas: {args.max_replicas} is less than the {args.replicas} of --replicas")


def _check_learning(args: argparse.Namespace) -> None:
    """Raise `UsageError` if drafters cannot learn, or would draft for tenants from whom they are to be kept apart."""
    if not args.learn:
        if args.learn_options or args.no_learn_key_file or args.learn_tenants != "apart":
            raise UsageError("--learn-options, --learn-tenants and --no-learn-key-file need --learn")
        return
    from ...online.options import LearningOptions

    if "checkpoint" in args.learn_options:
        raise UsageError("--learn-options: `checkpoint` is the folder of --learn")
    with usage_errors("--learn-options", TypeError, ValueError):
        LearningOptions.of(**args.learn_options)
    others = [item for item in args.assistant if not is_preset(item) and not item.startswith(EARLY_EXIT)]
    if not args.draft and not others:
        raise UsageError("--learn: nothing that learns drafts: add --draft MODEL, or name heads in --assistant")
    has_keys = bool(args.api_key or args.api_key_file or args.admin_key_file)
    if args.no_learn_key_file and not has_keys:
        raise UsageError("--no-learn-key-file: there are no keys; clients can set `speculation.learn` to false")
    if others and has_keys and (args.learn_tenants == "apart" or args.no_learn_key_file):
        raise UsageError(
            f"--learn: keys are kept apart by copies of --draft, and {others[0]} would draft for all of them: leave it "
            "out, or choose --learn-tenants together, without --no-learn-key-file"
        )


def check_extras() -> None:
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        raise UsageError(f'{", ".join(missing)} not installed: pip install "hf-smartspec[serve]"')
    if Version(OLDEST) > TRANSFORMERS:
        raise UsageError(f'serving needs transformers {OLDEST}, not {TRANSFORMERS}: pip install "hf-smartspec[serve]"')


def name_models(models: list[str]) -> dict[str, str]:
    """Return folders and hub ids by the names that clients use."""
    names: dict[str, str] = {}
    for text in models:
        name, sign, path = text.partition("=")
        if not sign or Path(text).exists():
            name, path = text, text
        if not name or not path:
            raise UsageError(f"{text!r} must be a folder, a hub id or NAME=MODEL")
        if name in names:
            raise UsageError(f"two models are named {name!r}: use NAME=MODEL")
        names[name] = path
    return names or {"demo": str(demo_folder("MODEL") / "models/target")}


def api_keys(args: argparse.Namespace) -> "ApiKeys":
    from ...serving.server.guard.keys import ApiKeys, read_keys

    salt = _salt(args)
    files = args.api_key_file, args.admin_key_file, args.no_learn_key_file
    with usage_errors("--api-key, --api-key-file, --admin-key-file or --no-learn-key-file"):
        keys, admin_keys, unlearnt_keys = (read_keys(path) if path else [] for path in files)
        return ApiKeys([*args.api_key, *keys], salt, admin_keys, unlearnt_keys)


def _salt(args: argparse.Namespace) -> bytes | None:
    """
    Return the salt of the folders by whose names of keys a new start finds what earlier ones have kept. Both have the
    same, so that either may be added or left out later.
    """
    from ...replicas.sharing.folder import SharedFolder

    with usage_errors("--shared"):
        shared = SharedFolder(args.shared) if args.shared else None
    with usage_errors("--learn"):
        learnt = SharedFolder(args.learn) if args.learn else None
        known = learnt.known_salt() if learnt else None
    with usage_errors("--shared"):
        salt = shared.salt(known) if shared else None
    with usage_errors("--learn"):
        own = learnt.salt(salt) if learnt else salt
    if salt not in (None, own):
        raise UsageError(
            f"--learn: {args.learn!r} names keys by another salt than {args.shared!r} of --shared, so that what was "
            "learnt from them would not be found: name a new folder, or remove the file `salt` in it, and begin anew"
        )
    return own
