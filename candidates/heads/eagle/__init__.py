"""EAGLE's heads: their layer, their files, and the configs in these."""
