"""The command line. ``chaz --help`` lists the commands; each is a module of this package.

Exit codes: 0 done; 1 the run failed, or an unexpected error; 2 a wrong command line; 3 the run was cancelled;
65 wrong input; 66 no such session, agent, run or request; 69 a service is away; 75 the wait timed out;
77 not permitted, or decided otherwise before; 78 a wrong setting.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from chaz import __version__
from chaz.cli import (
    attaching,
    chat,
    deciding,
    demo,
    limiting,
    looking,
    operating,
    pausing,
    processes,
    schedules,
    schema,
    sending,
    sessions,
    tree,
    up,
    using,
)
from chaz.errors import ChazError


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="chaz",
        description="LLM agents on Celery and PostgreSQL: one INSERT, one answer.",
        epilog="Settings come from CHAZ_* environment variables; an option wins over its variable.",
    )
    top.add_argument("--version", action="version", version=f"chaz {__version__}")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--database", metavar="URL", help="PostgreSQL (CHAZ_DATABASE_URL)")
    local = argparse.ArgumentParser(add_help=False)
    for one in (common, local):
        one.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # What brings its own database takes none.
    for module in (demo, up):
        module.add_commands(commands, local)
    for module in (
        *(sending, chat, sessions, attaching, looking, tree, using, deciding, schedules, pausing, limiting),
        *(processes, schema, operating),
    ):
        module.add_commands(commands, common)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code. Errors are one line; ``--debug`` shows the traceback."""
    # As Celery does: agents and configuration modules in the working directory can be imported.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options = parser().parse_args(arguments)
    try:
        code = options.run(options)
    except ChazError as error:
        if options.debug:
            traceback.print_exc()
        print(f"chaz: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output has gone (`chaz log … | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
