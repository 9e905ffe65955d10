"""This library."""

from pathlib import Path
from typing import Any

import torch

import hf_smartspec

from .hugging_face import about, generated, load_model
from .protocol import Engine, Way, serve


def load(job: dict[str, Any]) -> Engine:
    model = load_model(job)
    ways: dict[str, dict[str, Any]] = {name: {"assistant": name} for name in ("none", "prompt_lookup", "auto")}
    if "draft" in job["files"]:
        ways["draft model"] = {"assistant": load_model(job, "draft")}
    ways |= {Path(folder).name: {"assistant": folder} for folder in job["heads"]}
    if job["kind"] in ("int8", "int4"):
        hf_smartspec.quantize(model, job["kind"], torch.bfloat16)
        ways = {"generate on it": {}} | ways
    with torch.no_grad():
        hf_smartspec.enable(model)

    def forget(num_rows: int) -> None:
        """Empty the suffix trees of `auto`, which keep the answers of all calls."""
        hf_smartspec.suffix_trees(model).remove_namespace("")

    return Engine({name: Way(generated(model, arguments), True, forget) for name, arguments in ways.items()}, about())


if __name__ == "__main__":
    serve(load)
