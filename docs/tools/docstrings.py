"""This project's docstrings, as griffe's Google parser reads them: one parameter per entry, types from annotations."""

import re

from griffe import Extension

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*)(?: \(.*?\))?: ", re.MULTILINE)
_ARGS = re.compile(r"^(?:Args|Attributes):\n(?:    .*\n?|\n)+", re.MULTILINE)


class OneByOne(Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = _ARGS.sub(lambda match: _split(match[0]), obj.docstring.value)


def _split(section: str) -> str:
    parts = _ENTRY.split(section)  # what stands before, then names and text in turns
    entries = [
        f"    {name}: {text}" if text.endswith("\n") else f"    {name}: {text}\n"
        for names, text in zip(parts[1::2], parts[2::2])
        for name in names.split(", ")
    ]
    return parts[0] + "".join(entries)
