"""Train the heads of the demos' target, of EAGLE-3's and of Medusa's kind, on what it answers to its training prompts.

    python demos/train_heads.py --data DATA --output demos/models

`DATA` holds the files named in `training/corpus.py`. Questions that are held out there are not learnt from. Training
itself is `smartspec train`; a run that was interrupted goes on where the last checkpoint was.
"""

import argparse
import json
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_smartspec.commands.main import main as smartspec
from training.corpus import SOURCES, Corpus, load_corpus

HERE = Path(__file__).resolve().parent
# Prompts of each kind of text, as far as there are so many: those that the target answers, and others, whose responses
# are learnt as they are.
ANSWERED = {"math": 900, "sql": 900, "code": 400, "chat": 1000, "medical": 100, "howto": 100}
READ = {"math": 2000, "sql": 1600, "code": 400, "chat": 1400, "medical": 300, "howto": 300}
ALL = ["--max-length", "256", "--batch-size", "16", "--dtype", "bfloat16"]
EAGLE = ["--kind", "eagle3", *ALL]


class Stage(NamedTuple):
    """A run of `smartspec train`: the folder in which it leaves its drafter, and its further arguments."""

    name: str
    options: list[str]
    begins_as: str | None = None
    is_answered: bool = True


STAGES = {
    "eagle3": [
        Stage(
            "eagle3-answers",
            [*EAGLE, "--draft-vocab-size", "4096", "--neurons", "640", "--learning-rate", "2e-3", "--epochs", "4"],
        ),
        Stage("eagle3", [*EAGLE, "--learning-rate", "1e-3", "--epochs", "1"], "eagle3-answers", False),
    ],
    "medusa": [Stage("medusa", ["--kind", "medusa", *ALL, "--learning-rate", "1e-3", "--epochs", "1.5"])],
}  # fmt: skip


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl or .jsonl.gz files")
    parser.add_argument("--target", default=str(HERE / "models/target"), help="whose answers are learnt")
    parser.add_argument("--output", type=Path, default=HERE / "models", help="gets eagle3/ and medusa/")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/hf_smartspec/heads", help="prompts")
    parser.add_argument("--kinds", nargs="+", choices=list(STAGES), default=list(STAGES), help="what to train")
    parser.add_argument("--share", type=float, default=1.0, help="of the prompts, for a quick try")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="torch device")
    return parser.parse_args(argv)


def pick_prompts(corpus: Corpus, numbers: Mapping[str, int], share: float, skipped: Collection[str]) -> list[dict]:
    """Single questions of all kinds, in a random order that is always the same, without those of some ids."""
    rows, order = [], random.Random(0)
    for category, num in numbers.items():
        names = [name for name in corpus.train if SOURCES[name].category == category]
        examples = [item for name in names for item in corpus.train[name] if len(item.messages) == 2]
        unique = list({item.messages[0][1]: item for item in examples if item.id not in skipped}.values())
        rows += order.sample(unique, min(round(num * share), len(unique)))
    order.shuffle(rows)
    return [{"id": item.id, "prompt": item.messages[0][1], "response": item.messages[1][1]} for item in rows]


def write_prompts(args: argparse.Namespace) -> dict[bool, Path]:
    """Files of prompts that are answered (True), and of others."""
    paths = {is_answered: args.work / f"prompts-{is_answered}-{args.share}.jsonl" for is_answered in (True, False)}
    if all(path.exists() for path in paths.values()):
        return paths
    args.work.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.data)
    answered = pick_prompts(corpus, ANSWERED, args.share, ())
    others = pick_prompts(corpus, READ, args.share, {row["id"] for row in answered})
    for is_answered, rows in ((True, answered), (False, others)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        paths[is_answered].write_text(text, encoding="utf-8")
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    paths = write_prompts(args)
    for stage in (stage for kind in args.kinds for stage in STAGES[kind]):
        is_last = stage.name in args.kinds
        folder = (args.output if is_last else args.work) / stage.name
        options = [*stage.options, "--device", args.device, "--output", str(folder)]
        if stage.is_answered:
            options += ["--own-outputs", "80", "--answers", str(args.work / f"answers-{args.share}.json")]
        if stage.begins_as is not None:
            options += ["--draft", str(args.work / stage.begins_as)]
        if (folder / "checkpoints").exists():
            options.append("--resume")
        if code := smartspec(["train", args.target, str(paths[stage.is_answered]), *options]):
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
