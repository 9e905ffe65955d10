"""What runs in a peer's environment, which knows nothing of this library: `python -m runners.NAME JOB.json`."""
