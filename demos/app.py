"""The demo in the browser: `smartspec demo`, with the same arguments."""

import sys

from hf_smartspec.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
