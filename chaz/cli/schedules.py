"""``chaz schedules``: when agents wake by themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from chaz.cli.options import add_command, on_terminal, positive, print_json, producer_of
from chaz.cli.render import clipped, cost_text, one_line, terminal_width, tokens_text
from chaz.outcomes import Spent
from chaz.planning import Schedule
from chaz.producer import Chaz

if TYPE_CHECKING:
    from chaz.cli.options import Commands

EXIT_SKIPPED = 75
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_FIELDS = (
    *("prompt", "cron", "time_zone", "every", "at", "session", "expires_at", "max_fires", "max_failures"),
    *("jitter", "catch_up"),
)


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command and its verbs."""
    command = add_command(
        commands,
        common,
        "schedules",
        run_list,
        "when agents wake by themselves: list, add, modify, remove, fire, history",
    )
    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, parents=[common], help=help, description=help)
        one.set_defaults(run=run)
        one.add_argument("--json", action="store_true", help="print JSON")
        return one

    listing = verb("list", run_list, "list schedules: when each is due next, or why it is not")
    listing.add_argument("--agent", help="of this agent only")
    listing.add_argument("--retired", action="store_true", help="those that were removed, too")
    add = verb("add", run_add, "add one to an agent's")
    modify = verb("modify", run_modify, "change what is named of one, from now on")
    remove = verb("remove", run_remove, "remove one; its history stays")
    fire = verb("fire", run_fire, "fire one now, also if it is disabled; print the run's id")
    history = verb("history", run_history, "what came of its slots, the latest first")
    for one in (add, modify, remove, fire, history):
        one.add_argument("agent", help="whose")
        one.add_argument("id", help="what it is called")
    history.add_argument("--limit", type=positive, default=50, metavar="N", help="so many at most (default 50)")
    add.add_argument("prompt", help="what the agent is told")
    modify.add_argument("--prompt", help="what the agent is told")
    modify.add_argument("--enable", action="store_const", const=True, dest="enabled", help="let it fire (again)")
    modify.set_defaults(refuse=modify.error)
    for one in (add, modify):
        one.add_argument(
            "--disable",
            action="store_const",
            const=False,
            dest="enabled",
            help="do not let it fire until it is enabled",
        )
        one.add_argument("--cron", help="minute, hour, day of month, month, day of week: '30 9 * * MON-FRI'")
        one.add_argument("--time-zone", metavar="ZONE", help="of --cron and of times: Europe/Berlin (default UTC)")
        one.add_argument("--every", type=_seconds, metavar="TIME", help="so far apart: 90, 15m, 6h, 1d")
        one.add_argument("--at", type=datetime.fromisoformat, metavar="TIME", help="once: 2027-01-31T09:00")
        one.add_argument("--session", type=_or_none, help="pinned to it: a name or an id; none: each firing opens one")
        one.add_argument("--expires-at", type=_instant, metavar="TIME", help="nothing fires after it; or none")
        one.add_argument("--max-fires", type=_count, metavar="N", help="it fires so often at most; or none")
        one.add_argument("--max-failures", type=_count, metavar="N", help="so many in a row disable it; or none")
        one.add_argument("--jitter", type=_seconds, metavar="TIME", help="it may be so late")
        one.add_argument("--catch-up", choices=("skip", "once"), help="what to do about slots that were missed")


class _None:
    """What ``none`` on the command line stands for; an option that is left out is None itself."""


def _or_none(text: str) -> Any:
    return _None if text == "none" else text


def _instant(text: str) -> Any:
    return _None if text == "none" else datetime.fromisoformat(text)


def _count(text: str) -> Any:
    return _None if text == "none" else int(text)


def _seconds(text: str) -> float:
    """``90``, ``15m``, ``6h``, ``1d``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it like 90, 15m, 6h or 1d")
    return float(match[1]) * _UNITS[match[2]]


def _given(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name in (*_FIELDS, "enabled") if (value := getattr(options, name, None)) is not None}
    return {name: None if value is _None else value for name, value in given.items()}


def run_list(options: argparse.Namespace) -> int:
    """Print the schedules."""
    with producer_of(options) as chaz:
        if options.agent is None:
            found = chaz.schedules(retired=options.retired)
        else:
            found = chaz.agent(options.agent).schedules.list(retired=options.retired)
    for one in found:
        if options.json:
            print_json(one)
        else:
            _print(f"{one['agent']:16}  {one['id']:20}  {_when(one):28}  {_next(one)}  [{one_line(one['prompt'])}]")
    if not found and not options.json:
        print("there are no schedules")
    return 0


def _print(line: str) -> None:
    print(clipped(line, terminal_width()) if on_terminal() else line)


def _when(one: Mapping[str, Any]) -> str:
    if one["cron"] is not None:
        return f"{one['cron']} {one['time_zone']}"
    if one["every"] is not None:
        return f"every {one['every']:g} s"
    return f"at {_time(one['at'], one)}"


def _next(one: Mapping[str, Any]) -> str:
    where = f" in {one['session'] or one['session_id']}" if one["session_id"] is not None else ""
    return f"next {_time(one['next_at'], one)}{where}" if one["next_at"] is not None else one_line(one["reason"])


def _time(instant: datetime, one: Mapping[str, Any]) -> str:
    return f"{instant.astimezone(_zone(one['time_zone'])):%Y-%m-%d %H:%M:%S %Z}"


def _zone(name: str) -> ZoneInfo:
    """UTC in place of one that this machine does not know, as a newer one may that wrote it."""
    try:
        return ZoneInfo(name)
    except ZoneInfoNotFoundError:
        return ZoneInfo("UTC")


def _tell(options: argparse.Namespace, one: Mapping[str, Any]) -> int:
    if options.json:
        print_json(one)
    else:
        print(f"{one['id']} of {one['agent']}: {_next(one)}")
    return 0


def run_add(options: argparse.Namespace) -> int:
    """Add one."""
    given = _given(options)
    schedule = Schedule(options.id, given.pop("prompt"), **given)
    with producer_of(options) as chaz:
        return _tell(options, chaz.agent(options.agent).schedules.add(schedule))


def run_modify(options: argparse.Namespace) -> int:
    """Change one."""
    given = _given(options)
    if not given:
        options.refuse("say what is to be changed, such as --cron or --disable")
    with producer_of(options) as chaz:
        return _tell(options, chaz.agent(options.agent).schedules.modify(options.id, **given))


def run_remove(options: argparse.Namespace) -> int:
    """Remove one."""
    with producer_of(options) as chaz:
        chaz.agent(options.agent).schedules.remove(options.id)
    if options.json:
        print_json({"agent": options.agent, "id": options.id, "removed": True})
    else:
        print(f"{options.id} of {options.agent} is removed")
    return 0


def run_fire(options: argparse.Namespace) -> int:
    """Fire one; print the run's id, or why there is none."""
    with producer_of(options) as chaz:
        fired = chaz.agent(options.agent).schedules.fire(options.id)
    if options.json:
        print_json(vars(fired))
    else:
        print(fired.run_id or f"skipped ({fired.skipped}): {fired.detail}")
    return 0 if fired.run_id else EXIT_SKIPPED


def run_history(options: argparse.Namespace) -> int:
    """Print what came of its slots."""
    with producer_of(options) as chaz:
        found = chaz.agent(options.agent).schedules.history(options.id, limit=options.limit)
        zone = _zone_of(chaz, options)
    for one in found:
        if options.json:
            print_json(one)
            continue
        slot = f"{one['slot'].astimezone(zone):%Y-%m-%d %H:%M:%S %Z}"
        by = f" (by {one['fired_by']})" if one["fired_by"] else ""
        if one["skipped"]:
            _print(f"{slot:24}  skipped     {one['skipped']}: {one_line(one['detail'])}{by}")
            continue
        spent = Spent.model_validate(one["usage"])
        used = " ".join(filter(None, (tokens_text(spent), cost_text(spent))))
        state = one["state"] or "(gone)"
        where = one["session"] or one["session_id"]
        _print(f"{slot:24}  {state:10}  {one['run_id']}  [{where}] {one['reason'] or ''} {used}{by}".rstrip())
    if not found and not options.json:
        print("it has not fired")
    return 0


def _zone_of(chaz: Chaz, options: argparse.Namespace) -> ZoneInfo:
    found = chaz.agent(options.agent).schedules.list(retired=True)
    return _zone(next((one["time_zone"] for one in found if one["id"] == options.id), "UTC"))
