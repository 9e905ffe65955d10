"""SSSD's datastore: continuations of the last tokens in a large fixed text."""
