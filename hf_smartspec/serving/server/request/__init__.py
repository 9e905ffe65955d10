"""From a body to what `generate` is asked: fields, settings, and forms of answers."""
