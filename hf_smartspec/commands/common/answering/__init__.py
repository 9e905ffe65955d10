"""Common parts of commands that answer prompts: models, sampling, engines and streamed text."""
