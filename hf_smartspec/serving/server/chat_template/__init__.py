"""The chat template: prompts of messages and tools, and the form in which a model writes tool calls."""
