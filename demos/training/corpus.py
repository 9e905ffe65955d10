"""The training texts: which files are read, which rows are kept, and which are held out."""

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# One group of questions in 25 is held out. The first 8 hex digits of the digest already decided a 20 % test part that
# is not in these files, so the decision here reads the next 8.
HELDOUT_MODULUS = 25

MAX_SCHEMA_CHARS = 700
OPEN_MODELS = ("pythia", "falcon", "starcoder", "open-llama")


@dataclass(frozen=True)
class Example:
    """One conversation that ends with the response to learn.

    `messages` alternate between user and assistant; `learn_prompt` says whether the last user message is learnt too.
    """

    id: str
    group: str
    category: str
    file: str
    source: str
    messages: tuple[tuple[str, str], ...]
    learn_prompt: bool


@dataclass(frozen=True)
class Source:
    """How one file is used: `repeat` is how often its rows come up in one pass over the mix (0.5: every other row)."""

    category: str
    licence: str
    repeat: float
    learn_prompt: bool = True
    keep: Callable[[dict], bool] = lambda row: True
    clean: Callable[[dict], dict] = lambda row: row


def is_heldout(group: str) -> bool:
    """Return whether a question (an id up to its first `#`) is kept out of training, in every file it occurs in."""
    return int(hashlib.sha256(group.encode()).hexdigest()[8:16], 16) % HELDOUT_MODULUS == 0


def trim_create_tables(row: dict) -> dict:
    """Spider: keep the tables that the SQL mentions, and others in their order while the schema stays short.

    Whole schemas repeat for every question of a database and would take most of the training time.
    """
    schema, separator, question = row["prompt"].partition("\n\n-- Using the tables above")
    tables = re.findall(r'CREATE TABLE "([^"]+)" \(.*?\n\);', schema, flags=re.DOTALL)
    blocks = [match.group(0) for match in re.finditer(r'CREATE TABLE "[^"]+" \(.*?\n\);', schema, flags=re.DOTALL)]
    mentioned = set(re.findall(r"\w+", row["response"].lower()))
    kept = {i for i, table in enumerate(tables) if table.lower() in mentioned}
    kept = _fill_schema(blocks, kept)
    return {**row, "prompt": "\n".join(blocks[i] for i in sorted(kept)) + separator + question}


def trim_table_list(row: dict) -> dict:
    """Advising: the same for its table of fields, whose blocks are divided by lines of dashes (9,000 characters)."""
    schema, separator, question = row["prompt"].partition("\n\nQuestion:")
    header, _, body = schema.partition("Is Primary Key\n")
    blocks = [re.sub(r" +", " ", block.strip()) for block in re.split(r"\n-, -, -, -, -, -, -(?:\n|$)", body)]
    mentioned = set(re.findall(r"\w+", row["response"].lower()))
    kept = {i for i, block in enumerate(blocks) if block.split(",")[0].lower() in mentioned}
    kept = _fill_schema(blocks, kept)
    body = "\n".join(blocks[i] for i in sorted(kept))
    return {**row, "prompt": f"{header}Is Primary Key\n{body}{separator}{question}"}


def _fill_schema(blocks: list[str], kept: set[int]) -> set[int]:
    kept = set(kept)
    size = sum(len(blocks[i]) for i in kept)
    for i, block in enumerate(blocks):
        if i not in kept and size + len(block) <= MAX_SCHEMA_CHARS:
            kept.add(i)
            size += len(block)
    return kept


def strip_end_marks(row: dict) -> dict:
    """Model outputs may end in their own end-of-text marks, which would be learnt as text."""
    return {**row, "response": re.sub(r"(\s*(<\|[a-z_]+\|>|</s>))+\s*$", "", row["response"])}


SOURCES: dict[str, Source] = {
    "gsm8k": Source("math", "MIT", 2.0),
    "text_to_sql_spider": Source("sql", "CC BY-SA 4.0", 1.0, learn_prompt=False, clean=trim_create_tables),
    "text_to_sql_spider_syn": Source(
        "sql", "MIT (Spider: CC BY-SA 4.0)", 0.5, learn_prompt=False, clean=trim_create_tables
    ),
    "text_to_sql_advising": Source("sql", "CC BY 4.0", 0.4, learn_prompt=False, clean=trim_table_list),
    "mbpp": Source("code", "CC BY 4.0", 4.0),
    "humaneval": Source("code", "MIT", 4.0),
    "instruct_en_oasst1_val": Source("chat", "Apache-2.0", 2.0),
    "instruct_en_oa_models": Source(
        "chat",
        "Apache-2.0",
        0.7,
        keep=lambda row: any(name in row["model"] for name in OPEN_MODELS),
        clean=strip_end_marks,
    ),
    "instruct_en_medquad": Source("medical", "CC BY 4.0", 0.2),
    "multilingual_tldr": Source("howto", "CC BY 4.0", 0.5, keep=lambda row: row["language"] in ("en", "es", "fr")),
}


def read_rows(folder: Path, name: str) -> Iterator[dict]:
    """Rows of `name.jsonl` or `name.jsonl.gz` in `folder`; nothing if there is no such file."""
    for path in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"):
        if path.exists():
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                yield from (json.loads(line) for line in file)
            return


def to_example(row: dict, name: str) -> Example:
    """The conversation in one row: its `turns` up to the response where given, else prompt and response."""
    source = SOURCES[name]
    turns = row.get("turns") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["response"]},
    ]
    messages = tuple((turn["role"], turn["content"].replace("\r\n", "\n").rstrip()) for turn in turns)
    group = row["id"].split("#")[0]
    return Example(row["id"], group, source.category, name, row.get("source", name), messages, source.learn_prompt)


@dataclass
class Corpus:
    """Training examples by file name, and held-out ones by category."""

    train: dict[str, list[Example]]
    heldout: dict[str, list[Example]]

    @property
    def heldout_by_file(self) -> dict[str, list[Example]]:
        """Return the held-out examples by their file, as `train` has the others."""
        found: dict[str, list[Example]] = {}
        for items in self.heldout.values():
            for item in items:
                found.setdefault(item.file, []).append(item)
        return found


def load_corpus(folder: Path) -> Corpus:
    """Read every file of `SOURCES` that `folder` has, and split it by question.

    Raises:
        FileNotFoundError: if `folder` has none of the files.
    """
    examples = {}
    for name, source in SOURCES.items():
        rows = (source.clean(row) for row in read_rows(folder, name) if source.keep(row) and row["response"])
        found = [to_example(row, name) for row in rows]
        if found:
            examples[name] = found
    if not examples:
        raise FileNotFoundError(f"no training file in {folder}: expected one of {', '.join(SOURCES)} (.jsonl or .gz)")

    heldout: dict[str, list[Example]] = {}
    for example in (e for found in examples.values() for e in found if is_heldout(e.group)):
        heldout.setdefault(example.category, []).append(example)
    # A few questions occur word for word in several groups: those of the held-out part are not learnt either.
    questions = {e.messages[0][1] for found in heldout.values() for e in found}
    train = {
        name: [e for e in found if not is_heldout(e.group) and e.messages[0][1] not in questions]
        for name, found in examples.items()
    }
    return Corpus(train, heldout)
