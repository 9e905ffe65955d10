"""Several servers as one, on Ray Serve: replicas behind a front that knows whose text each of them has seen."""
