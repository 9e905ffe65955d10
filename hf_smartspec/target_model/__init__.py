"""Running the target: the packed forward with its layout, attention and cache, and models that run row by row."""
