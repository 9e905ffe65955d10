"""From a body to what `generate` is asked: fields, settings, forms of answers, chats as prompts."""
