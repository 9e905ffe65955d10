"""llama.cpp's server, called in its process: several rows are requests at once, which it batches as they come."""

import re
from typing import Any

import xllamacpp

from .protocol import Engine, Prompts, Way, serve

_LOOKUPS = ("ngram_simple", "ngram_map_k")
_MATCHED, _DRAFTED = 3, 10  # tokens; its defaults, 12 and 48, are for long texts, and draft nothing in short ones
_ROOM = 64  # tokens after a row's end, for drafts


def load(job: dict[str, Any]) -> Engine:
    names = {"plain": "none"} | ({"draft model": "draft_simple"} if "draft_gguf" in job["files"] else {})
    names |= {name.replace("_", "-"): name for name in _LOOKUPS}
    ways = {name: Servers(job, kind) for name, kind in names.items()}
    kernels = " ".join(re.findall(r"(\w+) = 1", xllamacpp.get_system_info()))
    about = f"xllamacpp {xllamacpp.__version__}, kernels with {kernels}"
    return Engine({name: Way(servers.decode, True, servers.start) for name, servers in ways.items()}, about)


class Servers:
    """A server with as many slots as rows are asked for; of these ways, none remembers more than its request."""

    def __init__(self, job: dict[str, Any], kind: str):
        self.job, self.kind = job, kind
        self.known: dict[int, Any] = {}

    def start(self, num_rows: int) -> None:
        if num_rows not in self.known:
            self.known[num_rows] = xllamacpp.Server(_params(self.job, self.kind, num_rows))

    def decode(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        asked = {
            "prompt": list(prompts[0]) if len(prompts) == 1 else [list(prompt) for prompt in prompts],
            "n_predict": num_tokens,
            "temperature": 0.0,
            "repeat_penalty": 1.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self.known[len(prompts)].handle_completions(asked)
        if "choices" not in answer:
            raise RuntimeError(f"llama.cpp answered {answer}")
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [[int(number) for number in re.findall(r"<(\d+)>", choice["text"])] for choice in choices]


def _params(job: dict[str, Any], kind: str, num_rows: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = job["files"]["gguf"]
    longest = max(map(len, job["prompts"])) + job["num_tokens"] + _ROOM
    params.n_ctx, params.n_parallel, params.kv_unified = longest * num_rows, num_rows, False
    params.cache_prompt, params.cache_ram_mib = False, 0  # nothing of the same prompt's last time is used
    params.verbosity = 0
    draft = params.speculative.draft
    for threads in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        threads.n_threads = job["threads"]
    if job["kind"] == "float32":  # keys and values are float16 otherwise
        for cache in (params, draft):
            cache.cache_type_k = cache.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if kind == "draft_simple":
        draft.mparams.path = job["files"]["draft_gguf"]
    if kind in _LOOKUPS:
        sizes = getattr(params.speculative, kind)
        sizes.size_n, sizes.size_m = _MATCHED, _DRAFTED
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
    return params


if __name__ == "__main__":
    serve(load)
