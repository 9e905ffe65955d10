"""The commands of `smartspec`."""
