"""`smartspec train`: drafters for a target of yours."""
