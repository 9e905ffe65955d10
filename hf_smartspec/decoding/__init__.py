"""The decoding loop: draft, forward, verify, commit, observe."""
