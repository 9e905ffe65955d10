"""How the target picks its token: logits processors, noise that can be repeated, arg max and top k."""
