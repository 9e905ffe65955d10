"""What tests of commands share."""

from hf_smartspec.commands import main as cli


def call(*arguments):
    """Exit status of one command line."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code
