"""Online learning of drafters from the requests that they draft for (Online Speculative Decoding)."""
