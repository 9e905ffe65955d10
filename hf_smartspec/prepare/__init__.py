"""From the arguments of a `generate` call to a call in the decoding loop."""
