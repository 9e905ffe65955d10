"""The held-out prompts that the demos show."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .corpus import SOURCES, Corpus, Example
from .evaluate import render_prompt

PROMPT_FILES = {
    "math": "gsm8k",
    "sql": "text_to_sql_spider",
    "chat": "instruct_en_oasst1_val",
    "code": "mbpp",
}
NOT_SHOWN = {"oa-6a31b2b3fc", "oa-54c2ed57f2"}  # an adult subject, and a question that is itself a transcript


def pick_prompts(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, per_category: int = 6, max_len: int = 400
) -> list[dict]:
    """Up to `per_category` single-turn held-out questions of each kind, whose rendered prompt has under `max_len`
    tokens."""
    rows = []
    for category, name in PROMPT_FILES.items():
        openings = set()  # first lines: no two questions about the same database
        for example in corpus.heldout.get(category, []):
            if len(openings) == per_category:
                break
            opening = example.messages[0][1].partition("\n")[0]
            if example.file != name or example.group in NOT_SHOWN or len(example.messages) > 2 or opening in openings:
                continue
            if len(tokenizer(render_prompt(example, tokenizer)).input_ids) < max_len:
                openings.add(opening)
                rows.append(_row(example))
    return rows


def _row(example: Example) -> dict:
    return {
        "id": example.id,
        "category": example.category,
        "source": example.source,
        "licence": SOURCES[example.file].licence,
        "prompt": example.messages[-2][1],
        "response": example.messages[-1][1],
    }


def write_prompts(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
