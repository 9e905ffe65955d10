"""The target's choice of token: logits processors, repeatable noise, arg max and top k."""
