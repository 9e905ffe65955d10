"""Sources that look tokens up in texts: what followed the same tokens before."""
