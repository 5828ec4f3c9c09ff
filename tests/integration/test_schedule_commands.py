"""``chaz schedules``, in the test's own process."""

from __future__ import annotations

import json

import pytest

from chaz.cli import main
from tests.fixtures.postgres import ScratchDatabase


class Commands:
    """Runs commands, and shows what they said."""

    def __init__(self, database: ScratchDatabase, capsys: pytest.CaptureFixture[str]) -> None:
        self._database, self._capsys = database, capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What the command said; of one that ends with another code, its complaint."""
        with pytest.raises(SystemExit) as exit:
            main(("schedules", arguments[0], "--database", self._database.url, *arguments[1:]))
        said = self._capsys.readouterr()
        assert exit.value.code == code, said.err
        return said.err if code not in {0, 75} else said.out


@pytest.fixture
def chaz_schedules(database: ScratchDatabase, capsys: pytest.CaptureFixture[str]) -> Commands:
    database.query(
        "insert into chaz.agents (name, queue, version, max_steps, timeout) values ('solo', 'solo', '1', 9, '1 h')"
    )
    return Commands(database, capsys)


def test_a_zone_that_is_not_known_here_is_shown_in_utc(chaz_schedules: Commands, database: ScratchDatabase) -> None:
    chaz_schedules("add", "solo", "daily", "Report.", "--cron", "0 9 * * *")
    chaz_schedules("fire", "solo", "daily")
    database.query("update chaz.schedules set time_zone = 'Mars/Olympus'")
    assert "0 9 * * * Mars/Olympus" in chaz_schedules("list")
    assert " UTC " in chaz_schedules("history", "solo", "daily")


def test_from_adding_one_to_its_history(chaz_schedules: Commands, database: ScratchDatabase) -> None:
    assert chaz_schedules("list") == "there are no schedules\n"
    added = chaz_schedules(
        *("add", "solo", "daily", "Report.", "--cron", "0 9 * * *", "--time-zone", "Asia/Kolkata"),
        *("--max-fires", "3", "--jitter", "30s", "--catch-up", "once"),
    )
    assert added.startswith("daily of solo: next ")
    assert added.endswith("09:00:00 IST\n") or " 09:00:" in added
    changed = json.loads(chaz_schedules("modify", "solo", "daily", "--every", "2h", "--max-fires", "none", "--json"))
    assert (changed["every"], changed["cron"], changed["max_fires"], changed["jitter"]) == (7200, None, None, 30)
    assert "solo" in chaz_schedules("list")
    assert json.loads(chaz_schedules("list", "--agent", "solo", "--json"))["id"] == "daily"

    run = chaz_schedules("fire", "solo", "daily").strip()
    assert run in chaz_schedules("history", "solo", "daily")
    database.query("update chaz.runs set state = 'failed', reason = 'model', ended_at = now()")
    database.query("update chaz.heads set active_run = null")
    (told,) = [json.loads(line) for line in chaz_schedules("history", "solo", "daily", "--json").splitlines()]
    assert (told["run_id"], told["state"], told["reason"], told["usage"]["calls"]) == (run, "failed", "model", 0)
    assert told["session"].startswith("schedule/solo/daily/")

    assert chaz_schedules("modify", "solo", "daily", "--disable").startswith("daily of solo: disabled by ")
    assert "next " in chaz_schedules("modify", "solo", "daily", "--enable")
    assert chaz_schedules("remove", "solo", "daily") == "daily of solo is removed\n"
    assert chaz_schedules("list") == "there are no schedules\n"
    assert "removed by " in chaz_schedules("list", "--retired")
    assert run in chaz_schedules("history", "solo", "daily")


def test_one_that_is_skipped_says_why(chaz_schedules: Commands, database: ScratchDatabase) -> None:
    database.query("select chaz.attach('s', 'solo')")
    assert " in s" in chaz_schedules("add", "solo", "daily", "Report.", "--every", "1d", "--session", "s")
    database.query("select chaz.detach('s', 'solo')")
    said = chaz_schedules("fire", "solo", "daily", code=75)
    assert said == "skipped (detached): its agent is no longer attached to its session\n"
    assert "detached" in chaz_schedules("history", "solo", "daily")


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("add", "solo", "a", "x", "--cron", "61 * * * *"), 65, "chaz: cron: '61 * * * *' is no cron expression"),
        (("add", "solo", "a", "x", "--cron", "0 9 * * *", "--time-zone", "Here"), 65, "chaz: time_zone: there is no"),
        (("add", "solo", "a", "x"), 65, "chaz: cron: give one of cron, every and at"),
        (("add", "solo", "a", "x", "--at", "2020-01-01"), 65, "chaz: at: 2020-01-01T00:00:00"),
        (("add", "solo", "a", "x", "--every", "soon"), 2, "'soon' is no time"),
        (("add", "nobody", "a", "x", "--every", "1h"), 66, "no worker has registered an agent 'nobody'"),
        (("modify", "solo", "a"), 2, "say what is to be changed"),
        (("modify", "solo", "a", "--enable"), 66, "agent 'solo' has no schedule 'a'"),
        (("remove", "solo", "a"), 66, "agent 'solo' has no schedule 'a'"),
        (("history", "solo", "a"), 66, "agent 'solo' has no schedule 'a'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    chaz_schedules: Commands, arguments: tuple[str, ...], code: int, what: str
) -> None:
    assert what in chaz_schedules(*arguments, code=code)
