"""transformers' own `generate`."""

from typing import Any

from transformers import CompileConfig

from .hugging_face import about, generated, load_model, unlearning
from .protocol import Engine, Way, serve


def load(job: dict[str, Any]) -> Engine:
    model = load_model(job)
    if job["settings"].get("compiled"):
        return Engine({"static cache": Way(generated(model, _compiled(job)), in_batches=True)}, about())
    ways = {
        "plain": Way(generated(model), in_batches=True),
        "prompt lookup": Way(generated(model, {"prompt_lookup_num_tokens": 10})),
    }
    if "draft" in job["files"]:
        draft = load_model(job, "draft")
        ways["draft model"] = Way(generated(model, {"assistant_model": draft}), prepare=unlearning(draft))
    return Engine(ways, about())


def _compiled(job: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with one cache length for all prompts, so that nothing is compiled again."""
    config = CompileConfig()
    setattr(config, "_compile_all_devices", True)  # noqa: B010  transformers compiles on GPUs only, if it is not asked
    longest = max(map(len, job["prompts"])) + job["num_tokens"]
    return {"cache_implementation": "static", "max_cache_len": longest, "compile_config": config}


if __name__ == "__main__":
    serve(load)
