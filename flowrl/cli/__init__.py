"""The command `flowrl`: check, show and run flows, list operators, look at runs.

0    done, and nothing is wrong
1    problems were found, or the run failed
2    wrong usage or settings
130  interrupted (Ctrl-C); what the run wrote is readable
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrl import __version__
from flowrl.errors import ConfigError, FlowError
from flowrl.schema.columns import nearest
from flowrl.schema.escaped import escaped

if TYPE_CHECKING:
    from flowrl.cli.parser import Parser

OK, PROBLEMS, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are one message on stderr; `--traceback` adds where they came from."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(arguments)
    except SystemExit as end:  # --help and --version
        return end.code if isinstance(end.code, int) else OK
    except KeyboardInterrupt:
        _say(arguments, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        sys.stderr.close()
        return OK
    except ConfigError as error:
        _say(arguments, f"error: {error}")
        return USAGE
    except FlowError as error:
        _say(arguments, f"error: {error}")
        return PROBLEMS
    except Exception as error:
        from flowrl.recipe.targets import described

        hint = "" if "--traceback" in arguments else "\n(--traceback shows where it came from)"
        _say(arguments, f"error: {described(error)}{hint}")
        return PROBLEMS


def _command(arguments: list[str]) -> int:
    from flowrl.cli import commands
    from flowrl.cli.parser import UsageError, build_parser
    from flowrl.runtime.options import OPTION_NAMES

    parser = build_parser(__version__, ", ".join(OPTION_NAMES))
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = args.parser
        given = unknown[0].partition("=")[0]
        hint = _hint(parser, command, given) if given.startswith("-") else "no further arguments are taken"
        raise UsageError(
            f"unknown {'option' if given.startswith('-') else 'argument'} '{given}'; {hint}\n(more: {command.prog} --help)"
        )
    args.arguments = arguments
    return commands.COMMANDS[args.command](args)


def _hint(parser: Parser, command: Parser, option: str) -> str:
    """What an option that a command does not take may have been meant for."""
    others = sorted({one.prog for one in parser.commands if option in one.options} - {command.prog})
    if others and not difflib.get_close_matches(option, command.options, n=1, cutoff=0.85):
        return f"it belongs to {' and '.join(f'`{prog}`' for prog in others[:3])}"
    return nearest(option, command.options)


def _say(arguments: list[str], message: str) -> None:
    sys.stdout.flush()
    if "--traceback" in arguments:
        traceback.print_exc()
    print(escaped(message, keep="\n\t"), file=sys.stderr)
