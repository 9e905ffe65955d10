"""llama.cpp through llama-cpp-python: one row by its own `generate`, several by one `llama_decode` for all of them."""

import ctypes
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from .protocol import Prompts, Way, serve

_NUM_DRAFTED = 2  # what llama-cpp-python recommends for CPUs; its default of 10 is for GPUs


def load(job: dict[str, Any]) -> dict[str, Way]:
    longest = max(map(len, job["prompts"])) + job["num_tokens"] + 16
    settings = {
        "model_path": job["files"]["gguf"],
        "n_threads": job["threads"],
        "n_threads_batch": job["threads"],
        "verbose": False,
    }
    if job["kind"] == "float32":  # its keys and values are float16 otherwise
        settings |= {"type_k": 0, "type_v": 0}
    plain = llama_cpp.Llama(n_ctx=longest, **settings)
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=_NUM_DRAFTED)
    looking = llama_cpp.Llama(n_ctx=longest, logits_all=True, draft_model=drafts, **settings)
    ways = {"plain": Way(_generated(plain)), "prompt lookup": Way(_generated(looking))}
    if job["batch_size"] > 1:
        ways["llama_decode in batches"] = Way(Batches(plain, job, longest), in_batches=True)
    return ways


def _generated(llama: Any):
    def decode(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        rows = []
        for prompt in prompts:
            llama.reset()  # nothing of the same prompt's last time is used
            rows.append(list(islice(llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0), num_tokens)))
        return rows

    return decode


class Batches:
    """Rows as sequences of one cache: their prompts one after the other, then a token of each at every step."""

    def __init__(self, llama: Any, job: dict[str, Any], longest: int):
        params = llama.context_params
        params.n_ctx, params.n_seq_max = longest * job["batch_size"], job["batch_size"]
        if hasattr(params, "kv_unified"):
            params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(llama.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context for several sequences")
        self.vocab_size = llama.n_vocab()
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.most = params.n_batch

    def __call__(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        rows = [[self._prefill(row, prompt)] for row, prompt in enumerate(prompts)]
        for step in range(num_tokens - 1):
            fed = [(tokens[-1], len(prompt) + step, row) for row, (prompt, tokens) in enumerate(zip(prompts, rows))]
            for row, token in enumerate(self._decode(fed, range(len(rows)))):
                rows[row].append(token)
        return rows

    def _prefill(self, row: int, prompt: Any) -> int:
        fed = [(token, position, row) for position, token in enumerate(prompt)]
        parts = [fed[start : start + self.most] for start in range(0, len(fed), self.most)]
        for part in parts[:-1]:
            self._decode(part, [])
        return self._decode(parts[-1], [len(parts[-1]) - 1])[0]

    def _decode(self, fed: list[tuple[int, int, int]], wanted: Any) -> list[int]:
        """The best next tokens at the wanted places of what is fed, `(token, position, row)`."""
        batch = self.batch
        batch.n_tokens = len(fed)
        for index, (token, position, row) in enumerate(fed):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = index in wanted
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._best(index) for index in wanted]

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).argmax())


if __name__ == "__main__":
    serve(load)
