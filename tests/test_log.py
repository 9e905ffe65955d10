"""Loggers follow transformers' verbosity, and say what they are."""

import logging

import pytest
from transformers.utils import logging as transformers_logging

from hf_smartspec.log import get_logger

NAME = "hf_smartspec.somewhere"


@pytest.fixture(autouse=True)
def verbosity():
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    yield
    transformers_logging.set_verbosity(before)
    logging.getLogger("hf_smartspec").setLevel(logging.NOTSET)


def said(capsys, is_configured=False):
    """What is printed, in an application that has or has not set up logging; pytest has."""
    logger, root = get_logger(NAME), logging.getLogger()
    handlers = root.handlers
    root.handlers = handlers if is_configured else []
    try:
        logger.info("fine")
        logger.warning("take care")
    finally:
        root.handlers = handlers
    return capsys.readouterr().err


def test_messages_bear_name_and_level(capsys):
    assert said(capsys) == "[hf_smartspec] WARNING: take care\n"


def test_verbosity_of_transformers_holds(capsys):
    transformers_logging.set_verbosity_error()
    assert said(capsys) == ""
    transformers_logging.set_verbosity_info()
    assert said(capsys) == "[hf_smartspec] INFO: fine\n[hf_smartspec] WARNING: take care\n"
    logging.getLogger("hf_smartspec").setLevel(logging.ERROR)
    assert said(capsys) == "", "its own level goes first"


def test_without_transformers_handler_nothing_is_printed(capsys, monkeypatch):
    """As after `disable_default_handler()`; pytest has added handlers of its own."""
    monkeypatch.setattr(transformers_logging.get_logger(), "handlers", [])
    assert said(capsys) == ""


def test_handlers_of_the_application_get_it_instead(caplog, capsys):
    assert said(capsys, is_configured=True) == ""
    assert [(record.name, record.getMessage()) for record in caplog.records] == [(NAME, "take care")]
