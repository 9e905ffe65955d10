"""What holds for all tests of benches is what holds for those of commands."""

from ..commands.conftest import _progress_bars_stay_on, folder  # noqa: F401
