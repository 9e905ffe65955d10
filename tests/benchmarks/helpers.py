"""Helpers of the tests of benches."""

from benchmarks import __main__ as benches


def bench(*words):
    """Exit status of one `python -m benchmarks`."""
    try:
        return benches.main([str(word) for word in words])
    except SystemExit as error:
        return error.code
