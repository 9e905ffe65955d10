"""`smartspec bench rollouts`."""
