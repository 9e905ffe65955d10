"""
transformers' own server: models of a process in which `enable` was called draft there, too.

    pip install "transformers[serving]"
    python demos/examples/transformers_serve.py
"""

import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from transformers.cli.serve import Serve

import hf_smartspec

MODEL = str(Path(__file__).resolve().parents[1] / "models/target")
QUESTION: Any = [{"role": "user", "content": "What is 12 times 4?"}]


def ask(client: OpenAI) -> list[str]:
    """The pieces of an answer."""
    stream: Any = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=40, temperature=0, stream=True
    )
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def main(port: int = 8001, assistant: Any = "auto") -> tuple[Any, Any]:
    """Return the outputs without and with speculation."""
    server = Serve(MODEL, host="127.0.0.1", port=port, device="cpu", dtype="float32", non_blocking=True)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    try:
        while not server.server.started:
            if not server._thread.is_alive():  # uvicorn has said why
                raise SystemExit(f"transformers' server cannot listen on port {port}.")
            time.sleep(0.1)
        plain = ask(client)
        with hf_smartspec.enable(assistant=assistant):  # the line
            fast = ask(client)
    finally:
        server.kill_server()
    print("".join(fast))
    print(f"The same without speculation: {''.join(plain) == ''.join(fast)}, in {len(plain)} and {len(fast)} pieces.")
    return "".join(plain), "".join(fast)


if __name__ == "__main__":
    main()
