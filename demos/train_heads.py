"""Train the heads of the demos' target, of EAGLE-3's and of Medusa's kind, on what it answers to its training prompts.

    python demos/train_heads.py --data DATA --output demos/models

`DATA` holds the files named in `training/corpus.py`. Questions that are held out there are not learnt from. Training
itself is `smartspec train`; a run that was interrupted goes on where the last checkpoint was.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from hf_smartspec.commands.main import main as smartspec
from training.corpus import SOURCES, Corpus, load_corpus

HERE = Path(__file__).resolve().parent
# Prompts of each kind of text that the target answers, as far as there are so many.
PROMPTS = {"math": 6000, "sql": 4000, "code": 900, "chat": 1000, "medical": 600, "howto": 600}
ALL = ["--own-outputs", "96", "--max-length", "384", "--batch-size", "16", "--dtype", "bfloat16"]
OPTIONS = {
    "eagle3": ["--draft-vocab-size", "4096", "--neurons", "640", "--learning-rate", "2e-3", "--epochs", "2.5"],
    "medusa": ["--learning-rate", "1e-3", "--epochs", "1.5"],
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl or .jsonl.gz files")
    parser.add_argument("--target", default=str(HERE / "models/target"), help="whose answers are learnt")
    parser.add_argument("--output", type=Path, default=HERE / "models", help="gets eagle3/ and medusa/")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/hf_smartspec/heads", help="prompts")
    parser.add_argument("--kinds", nargs="+", choices=list(OPTIONS), default=list(OPTIONS), help="what to train")
    parser.add_argument("--share", type=float, default=1.0, help="of the prompts, for a quick try")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="torch device")
    return parser.parse_args(argv)


def pick_prompts(corpus: Corpus, share: float) -> list[dict]:
    """Single questions of all kinds, in a random order that is always the same."""
    rows, order = [], random.Random(0)
    for category, num in PROMPTS.items():
        names = [name for name in corpus.train if SOURCES[name].category == category]
        examples = [item for name in names for item in corpus.train[name] if len(item.messages) == 2]
        unique = list({item.messages[0][1]: item for item in examples}.values())
        rows += order.sample(unique, min(round(num * share), len(unique)))
    order.shuffle(rows)
    return [{"id": item.id, "prompt": item.messages[0][1], "response": item.messages[1][1]} for item in rows]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    path = args.work / f"prompts-{args.share}.jsonl"
    if not path.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        rows = pick_prompts(load_corpus(args.data), args.share)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    for kind in args.kinds:
        options = ["--kind", kind, *ALL, *OPTIONS[kind], "--device", args.device]
        options += ["--output", str(args.output / kind), "--answers", str(args.work / f"answers-{args.share}.json")]
        if (args.output / kind / "checkpoints").exists():
            options.append("--resume")
        if code := smartspec(["train", args.target, str(path), *options]):
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
