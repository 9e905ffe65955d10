"""
LangChain's chat model on a server of this library: one question, several at once, and a stream. In another terminal,
then here:

    smartspec serve demo=demos/models/target --dtype float32
    pip install langchain-openai
    python demos/examples/langchain_chat.py
"""

import sys
from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

TEMPLATE = ChatPromptTemplate.from_messages([("user", "What is {number} times 4?")])
NUMBERS = [{"number": 12}, {"number": 7}]
PLAIN = {"speculation": {"assistant": "none"}}


def main(url: str = "http://127.0.0.1:8000/v1") -> tuple[Any, Any]:
    """Return the outputs without and with speculation."""
    settings: Any = {"model": "demo", "base_url": url, "api_key": SecretStr("none"), "temperature": 0, "max_tokens": 40}
    plain = [answer.content for answer in (TEMPLATE | ChatOpenAI(**settings, extra_body=PLAIN)).batch(NUMBERS)]

    chain = TEMPLATE | ChatOpenAI(**settings)
    fast = [answer.content for answer in chain.batch(NUMBERS)]  # these run together
    pieces = [piece.content for piece in chain.stream(NUMBERS[0])]
    one = chain.invoke(NUMBERS[1])

    print(fast[0])
    print(f"The same without speculation: {plain == fast}; {one.response_metadata['token_usage']}")
    return [*plain, *plain], [*fast, "".join(pieces), one.content]


if __name__ == "__main__":
    main(*sys.argv[1:])
