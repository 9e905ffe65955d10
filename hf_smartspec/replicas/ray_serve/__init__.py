"""Several servers as one, on Ray Serve: replicas with a front, and routing by the texts that each has served."""
