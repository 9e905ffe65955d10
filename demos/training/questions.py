"""Questions that models for everyday use are asked, made of the rows of the corpus."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .corpus import Example

DEMOS = Path(__file__).resolve().parents[1]
MAX_CHARS = 1500  # of a question


class Task(NamedTuple):
    """A kind of questions: the file whose rows they are made of, how, and how many there are at most."""

    name: str
    file: str
    most: int
    text: Callable[[str, str], str] = lambda prompt, response: prompt  # of a row's prompt and response


TASKS = (
    Task("math", "gsm8k", 4500),
    Task("sql", "text_to_sql_spider", 1500),
    Task("sql", "text_to_sql_advising", 500),
    Task("chat", "instruct_en_oasst1_val", 1000),
    Task("chat", "instruct_en_oa_models", 1500),
    Task("chat", "instruct_en_medquad", 2000),
    Task("howto", "multilingual_tldr", 1000),
    Task("code", "mbpp", 1000),
    Task("code", "humaneval", 200, lambda code, _: f"Complete this Python function.\n\n```python\n{code.strip()}\n```"),
    Task("code", "mbpp", 700, lambda _, code: f"Explain what this code does.\n\n```python\n{code}\n```"),
    Task("code", "mbpp", 700, lambda task, _: task.partition("\nYour code")[0]),
    Task(
        "edit", "mbpp", 500,
        lambda _, code: f"Add a docstring and type hints to this code.\n\n```python\n{code}\n```",
    ),
    Task(
        "summary", "instruct_en_medquad", 1500,
        lambda _, text: "Summarize this text in two sentences.\n\n" + " ".join(text.split()),
    ),
)  # fmt: skip


def pick_questions(examples: Mapping[str, Sequence[Example]]) -> list[dict]:
    """
    Return questions of all tasks, made of examples by file, in a random order that is always the same: the first ones
    are a fair sample of all. Rows that the demos' prompts are made of are left out.
    """
    shown = [json.loads(line) for name in ("prompts", "real_prompts") for line in _lines(DEMOS / f"{name}.jsonl")]
    groups, texts = {row["id"].split("#")[0] for row in shown}, {row["prompt"] for row in shown}
    order, rows = random.Random(0), []
    for task in TASKS:
        found = {}
        for item in examples.get(task.file, ()):
            question = task.text(item.messages[-2][1], item.messages[-1][1])
            if item.group not in groups and question not in texts and _is_fit(item, question):
                found.setdefault(question, {"id": item.id, "category": task.name, "prompt": question})
        rows += order.sample(list(found.values()), min(task.most, len(found)))
    order.shuffle(rows)
    return list({row["prompt"]: row for row in rows}.values())


def _is_fit(item: Example, question: str) -> bool:
    """Return whether a question is short enough, and in English where its file has other languages."""
    return len(question) <= MAX_CHARS and (item.file != "multilingual_tldr" or "cheat sheet" in question)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
