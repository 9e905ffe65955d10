"""`python -m benchmarks NAME`: one measurement of the project. Only the bench that runs is imported."""

import difflib
import sys
from collections.abc import Sequence

from hf_smartspec.commands.main import USAGE_ERROR, guarded

from .benches import BENCHES, load_parser, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench and return its exit status: 0, 1 (a claim failed), 2 (bad arguments) or 130 (Ctrl-C)."""
    return guarded("benchmarks", _dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in BENCHES:
        return _listing(arguments)
    name, *rest = arguments
    parser = load_parser(name)
    return BENCHES[name].run(parse(parser, rest), parser)


def _listing(arguments: Sequence[str]) -> int:
    """Print all benches on request; refuse words that name none."""
    if arguments and arguments[0] not in ("-h", "--help"):
        near = difflib.get_close_matches(arguments[0], BENCHES, n=1)
        meant = "".join(f", did you mean {name!r}?" for name in near)
        print(f"benchmarks: error: invalid choice: {arguments[0]!r}{meant} (see benchmarks --help)", file=sys.stderr)
        return USAGE_ERROR
    width = max(map(len, BENCHES)) + 2
    lines = [f"  {name:{width}}{bench.help}" for name, bench in BENCHES.items()]
    usage = [
        "usage: python -m benchmarks NAME ...",
        "",
        *lines,
        "",
        "python -m benchmarks NAME --help says what it takes.",
    ]
    print("\n".join(usage), file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
