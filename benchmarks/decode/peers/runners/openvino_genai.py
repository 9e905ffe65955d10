"""OpenVINO GenAI's continuous batching: rows are requests at once."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from .openvino_graph import write_graph
from .protocol import Engine, Prompts, Way, serve

genai: Any = importlib.import_module("openvino_genai")  # this module has its name

_GIGABYTES = 2  # for keys and values
_PREFILLED = (
    4096  # tokens of prompts at once; in parts, as by default, its draft models have been seen to change tokens
)
_DRAFTED = {"prompt lookup": 10, "draft model": 4}  # tokens at once
_MATCHED = 3  # tokens, at most


def load(job: dict[str, Any]) -> Engine:
    folders = {}
    for name in job["files"].keys() & {"arrays", "draft_arrays"}:
        folders[name] = Path(name).absolute()
        write_graph(Path(job["files"][name]), job["kind"], folders[name])
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    # Where the CPU has no instructions for bfloat16, weights stay in it and are computed with in float32.
    precision = "bf16" if job["kind"] != "float32" and "BF16" in capabilities else "f32"
    settings = {
        "INFERENCE_NUM_THREADS": job["threads"],
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    found: dict[str, dict[str, Any]] = {"plain": {}, "prompt lookup": {"prompt_lookup": True}}
    if "draft_arrays" in folders:
        found["draft model"] = {"draft_model": genai.draft_model(folders["draft_arrays"], "CPU", **settings)}
    pipelines = {name: Pipeline(name, folders["arrays"], settings | extra) for name, extra in found.items()}
    about = f"openvino {openvino.__version__}, {' '.join(capabilities)}"
    return Engine({name: Way(pipeline.decode, in_batches=True) for name, pipeline in pipelines.items()}, about)


class Pipeline:
    """Keeps nothing of a request: prefixes are not cached."""

    def __init__(self, way: str, folder: Path, settings: dict[str, Any]):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = _GIGABYTES, False
        scheduler.max_num_batched_tokens = _PREFILLED
        self.way = way
        self.pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)

    def decode(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        config.set_eos_token_id(0)  # it wants one
        if self.way in _DRAFTED:
            config.num_assistant_tokens = _DRAFTED[self.way]
        if self.way == "prompt lookup":
            config.max_ngram_size = _MATCHED
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self.pipeline.generate(ids, [config] * len(ids))
        results.sort(key=lambda result: result.m_request_id)
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]


if __name__ == "__main__":
    serve(load)
