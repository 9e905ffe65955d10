"""Chat templates: prompts from messages and tools, and the syntax in which a model writes tool calls."""
