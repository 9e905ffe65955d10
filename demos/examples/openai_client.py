"""
OpenAI's client on a server of this library: chats, streams and completions. In another terminal, then here:

    smartspec serve demo=demos/models/target --dtype float32
    python demos/examples/openai_client.py
"""

import sys
from typing import Any

from openai import OpenAI

QUESTION: Any = [{"role": "user", "content": "What is 12 times 4?"}]
CODE = "def add(a, b):"
PLAIN = {"speculation": {"assistant": "none"}}


def main(url: str = "http://127.0.0.1:8000/v1") -> tuple[Any, Any, dict[str, Any]]:
    """Return the outputs without and with speculation, and print the figures of the server."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    chat: Any = {"model": model, "messages": QUESTION, "max_tokens": 40}
    completion: Any = {"model": model, "prompt": CODE, "max_tokens": 40, "temperature": 0.8, "seed": 7}

    plain = [client.chat.completions.create(**chat, temperature=0, extra_body=PLAIN).choices[0].message.content]
    plain.append(client.completions.create(**completion, extra_body=PLAIN).choices[0].text)

    answer = client.chat.completions.create(**chat, temperature=0)
    fast = [answer.choices[0].message.content, client.completions.create(**completion).choices[0].text]

    parts = []
    for chunk in client.chat.completions.create(**chat, temperature=0, stream=True):
        if chunk.choices:
            parts.append(chunk.choices[0].delta.content or "")
            print(parts[-1], end="", flush=True)
    print()

    speculation = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    print(f"The same without speculation: {plain == fast}, and in pieces: {''.join(parts) == fast[0]}.")
    print(f"{speculation['draft_acceptance_rate']:.0%} of {speculation['num_draft_tokens']} drafted tokens accepted")
    return [*plain, plain[0]], [*fast, "".join(parts)], speculation


if __name__ == "__main__":
    main(*sys.argv[1:])
