"""What transformers announces to withdraw fails the tests that use it: a break is seen before it comes."""

import pytest
from torch import nn
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg


class Renamed(nn.Module):
    @deprecate_kwarg("before", "99.0", new_name="after")
    def forward(self, after=None):
        return after


def test_former_names_of_a_forwards_arguments():
    assert Renamed()(after=1) == 1
    with pytest.raises(FutureWarning, match="Use `after` instead"):
        Renamed()(before=1)


def test_announcements_in_the_log():
    with pytest.raises(AssertionError, match="announces"):
        logging.get_logger("transformers.tests").warning("`before` is deprecated.")
