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
    text: Callable[[str, str], str] = lambda prompt, response: prompt  # of a row's prompt and response
    most: int | None = None


def _code(text: str) -> str:
    return f"\n\n```python\n{text.strip()}\n```"


def _task(text: str) -> str:
    """Return a task of MBPP without its tests."""
    return text.partition("\nYour code")[0]


TASKS = (
    Task("math", "gsm8k"),
    Task("sql", "text_to_sql_spider", most=3300),
    Task("sql", "text_to_sql_advising", most=700),
    Task("chat", "instruct_en_oasst1_val"),
    Task("chat", "instruct_en_oa_models"),
    Task("chat", "instruct_en_medquad"),
    Task("howto", "multilingual_tldr", most=1200),
    Task("code", "mbpp"),
    Task("code", "humaneval", lambda code, _: "Complete this Python function." + _code(code)),
    Task("code", "mbpp", lambda _, code: "Explain what this code does." + _code(code)),
    Task("code", "mbpp", lambda task, _: _task(task)),
    Task("edit", "mbpp", lambda _, code: "Add a docstring and type hints to this code." + _code(code)),
    Task(
        "summary", "instruct_en_medquad",
        lambda _, text: "Summarize this text in two sentences.\n\n" + " ".join(text.split()), most=2500,
    ),
)  # fmt: skip
MORE_TASKS = (  # further questions about the same rows, to learn from only
    Task("code", "mbpp", lambda _, code: "Rewrite this Python function in JavaScript." + _code(code)),
    Task("code", "mbpp", lambda _, code: "Write unit tests for this function." + _code(code)),
    Task("code", "mbpp", lambda _, code: "Find bugs in this code and improve it." + _code(code)),
    Task(
        "code", "mbpp",
        lambda _, code: "What is the time complexity of this code? Explain step by step." + _code(code),
    ),
    Task("code", "mbpp", lambda task, _: _task(task) + "\nExplain how your solution works."),
    Task("code", "mbpp", lambda task, _: "Can you help me with some Python? " + _task(task)),
    Task("code", "mbpp", lambda task, _: _in_cpp(_task(task))),
    Task("code", "mbpp", lambda _, code: "Rewrite this code as a class with a method, with comments." + _code(code)),
    Task("code", "humaneval", lambda code, _: "Write this Python function." + _code(code)),
    Task(
        "code", "humaneval",
        lambda code, _: "Explain what this function should do, and give a few examples." + _code(code),
    ),
    Task("code", "humaneval", lambda code, rest: "Explain this code line by line." + _code(code + rest)),
    Task("code", "humaneval", lambda code, rest: "Write unit tests for this function." + _code(code + rest)),
    Task("math", "gsm8k", lambda question, _: question + " Think step by step.", most=3500),
    Task("chat", "instruct_en_medquad", lambda question, _: "Explain to a friend: " + question, most=2500),
    Task("chat", "multilingual_tldr", lambda question, _: "How do I use this command? Give examples. " + question),
)  # fmt: skip


def _in_cpp(task: str) -> str:
    return task.replace("python function", "C++ function").replace("Python", "C++") + " Use C++."


def pick_questions(examples: Mapping[str, Sequence[Example]], tasks: Sequence[Task] = TASKS) -> list[dict]:
    """
    Return questions of some tasks, made of examples by file, in a random order that is always the same: the first ones
    are a fair sample of all. Rows that the demos' prompts are made of are left out.
    """
    shown = [json.loads(line) for name in ("prompts", "real_prompts") for line in _lines(DEMOS / f"{name}.jsonl")]
    groups, texts = {row["id"].split("#")[0] for row in shown}, {row["prompt"] for row in shown}
    order, rows = random.Random(0), []
    for task in tasks:
        found = {}
        for item in examples.get(task.file, ()):
            question = task.text(item.messages[-2][1], item.messages[-1][1])
            if item.group not in groups and question not in texts and _is_fit(item, question):
                found.setdefault(question, {"id": item.id, "category": task.name, "prompt": question})
        num = len(found) if task.most is None else min(task.most, len(found))
        rows += order.sample(list(found.values()), num)
    order.shuffle(rows)
    return list({row["prompt"]: row for row in rows}.values())


def _is_fit(item: Example, question: str) -> bool:
    """Return whether a question is short enough, and in English where its file has other languages."""
    return len(question) <= MAX_CHARS and (item.file != "multilingual_tldr" or "cheat sheet" in question)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
