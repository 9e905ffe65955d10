"""Sharing of outputs and learnt drafters among replicas, through a folder that all of them reach."""
