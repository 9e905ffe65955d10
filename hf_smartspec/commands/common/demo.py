"""The demo's models and prompts, the default of many commands. A checkout has them, the installed package has not."""

from pathlib import Path

from .arguments import UsageError

_DEMOS = Path("demos")
_PARTS = ("models/target/tokenizer.json", "models/target/config.json", "models/draft/config.json", "prompts.jsonl")


def find_demo() -> Path | None:
    """Return the folder with the demo's models and prompts, in the working folder or the repository, or None."""
    for folder in (_DEMOS, Path(__file__).parents[3] / _DEMOS):
        if all((folder / part).is_file() for part in _PARTS):
            return folder
    return None


def demo_folder(*needed: str) -> Path:
    """
    Return the folder of `find_demo`, which replaces arguments that were not given.

    Args:
        needed (`str`): These arguments; none, where no argument could name other files.

    Raises:
        UsageError: if there is no such folder; the message names the arguments to give.
    """
    folder = find_demo()
    if folder is None:
        missing = " and ".join(needed)
        remedy = f"name {missing}, or call this" if needed else "call this"
        raise UsageError(
            f"the demo's models and prompts come with the repository, not the package: {remedy} in a checkout"
        )
    return folder
