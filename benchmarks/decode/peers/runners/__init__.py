"""Programs for peers' environments, which have nothing of this library: `python -m runners.NAME JOB.json`."""
