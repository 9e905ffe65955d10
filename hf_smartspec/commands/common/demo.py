"""The demo's models and prompts, which commands run on by default: a checkout has them, a wheel has not."""

from pathlib import Path

from .arguments import UsageError

_DEMOS = Path("demos")
_PARTS = ("models/target/tokenizer.json", "models/target/config.json", "models/draft/config.json", "prompts.jsonl")


def find_demo() -> Path | None:
    """The folder with the demo's models and prompts, here or in the repository; None where there is none."""
    for folder in (_DEMOS, Path(__file__).parents[3] / _DEMOS):
        if all((folder / part).is_file() for part in _PARTS):
            return folder
    return None


def demo_folder(*needed: str) -> Path:
    """
    The same, in place of arguments that were not given.

    Args:
        needed (`str`): The arguments that name what is taken from it; none, if nothing can take its place.

    Raises:
        UsageError: where there is none; says which arguments to give.
    """
    folder = find_demo()
    if folder is None:
        missing = " and ".join(needed)
        remedy = f"name {missing}, or call this" if needed else "call this"
        raise UsageError(
            f"the demo's models and prompts come with the repository, not the package: {remedy} in a checkout"
        )
    return folder
