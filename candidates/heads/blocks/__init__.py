"""Block drafters: small transformers that predict a whole block of coming tokens in one forward."""
