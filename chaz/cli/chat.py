"""``chaz chat``: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import TYPE_CHECKING

from chaz.cli.conversation import HELP, Conversation, look_again
from chaz.cli.options import add_command, on_terminal, session_target, settings_of
from chaz.errors import ConfigurationError
from chaz.producer import AsyncChaz

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from chaz.cli.options import Commands

LOOK_EVERY = 0.3
TWICE_WITHIN = 2.0
"""Seconds within which a second Ctrl-C leaves, if nothing is entered meanwhile."""


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    chat = add_command(commands, common, "chat", run_chat, "talk with the agents of a session")
    chat.add_argument("session", nargs="?", help="its name (made if new) or id; left out, a new one is made")
    chat.add_argument("--agent", help="let this agent in, and have it answer when nobody is named")
    chat.add_argument("--sender", help="who speaks (default: the user's name)")
    chat.add_argument(
        "--history", type=int, default=20, metavar="N", help="show so many of the last entries first (default 20)"
    )


def run_chat(options: argparse.Namespace) -> int:
    """Talk until the person leaves. Runs go on."""
    # It has a line of its own for a database that is away.
    logging.getLogger("psycopg").setLevel("ERROR")
    asyncio.run(_chat(options))
    return 0


async def _chat(options: argparse.Namespace) -> None:
    user = options.sender or os.environ.get("USER") or "person"
    name, id = session_target(options.session or f"chat-{user}-{datetime.now():%Y%m%d-%H%M%S}"[:200])
    async with AsyncChaz(settings=settings_of(options)) as chaz:
        session = chaz.session(name, id=id)
        conversation = Conversation(chaz, session, sender=user, show=_show, colour=on_terminal())
        await conversation.open(history=max(0, options.history))
        if options.agent:
            await conversation.enter(f"/attach {options.agent} lead")
        if sys.stdin.isatty() and on_terminal():
            await _on_terminal(conversation, name or str(id))
        else:
            await _from_pipe(conversation)


def _show(text: str) -> None:
    print(text, flush=True)


@contextlib.asynccontextmanager
async def _beside(*tasks: asyncio.Task[None]) -> AsyncGenerator[None]:
    """These at work meanwhile; what one of them raises ends the conversation."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def _on_terminal(conversation: Conversation, name: str) -> None:
    try:
        from prompt_toolkit.patch_stdout import patch_stdout
    except ModuleNotFoundError:
        raise ConfigurationError("chaz chat needs prompt-toolkit: pip install 'chaz[chat]'") from None
    prompt = _prompt(conversation)
    print(f"session {name}; /help lists commands; back here with: chaz chat {name}")
    with patch_stdout(raw=True):
        following = asyncio.create_task(conversation.follow())
        looking = asyncio.create_task(look_again(conversation, LOOK_EVERY))
        async with _beside(following, looking):
            await _talk(conversation, prompt, following)


def _prompt(conversation: Conversation) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.styles import Style

    commands = [line.split()[0].rstrip(",") for line in HELP.splitlines() if line.startswith("/")]
    prompt: PromptSession[str] = PromptSession(
        lambda: conversation.question(typing=bool(prompt.default_buffer.text)),
        bottom_toolbar=lambda: "\n".join(conversation.status()),
        refresh_interval=LOOK_EVERY,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        style=Style.from_dict({"bottom-toolbar": "noreverse #888888"}),
    )
    return prompt


async def _talk(conversation: Conversation, prompt: PromptSession[str], following: asyncio.Task[None]) -> None:
    """Read lines until the person leaves: a Ctrl-C cancels what is at work, another one soon after leaves."""
    last = -TWICE_WITHIN
    while not conversation.leaving and not following.done():
        try:
            line = await prompt.prompt_async()
        except EOFError:
            return
        except KeyboardInterrupt:
            if time.monotonic() - last < TWICE_WITHIN:
                return
            await conversation.enter("/cancel")
            last = time.monotonic()
            continue
        last = -TWICE_WITHIN
        await conversation.enter(line)


async def _from_pipe(conversation: Conversation) -> None:
    """Say each line of standard input, and go on with the next when it is answered, or asks for one."""
    loop = asyncio.get_running_loop()
    while not conversation.leaving and (line := await loop.run_in_executor(None, sys.stdin.readline)):
        conversation.question(typing=False)
        await conversation.enter(line)
        over = False
        while not over:
            over = conversation.last is None or await conversation.last.ready()
            await conversation.catch_up()
            await conversation.look()
            if conversation.asked:
                break
            await asyncio.sleep(0 if over else LOOK_EVERY)
