"""A listener that hears no bell any more: it goes on by polling, says so, and listens again when it can."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from chaz import Chaz
from chaz.testing import eventually
from tests.fixtures.postgres import ScratchDatabase
from tests.fixtures.processes import Processes
from tests.fixtures.proxy import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SOON = {"sweep": "1", "database_silence": "2", "long_poll": "1"}


def modes(database: ScratchDatabase) -> list[str]:
    """Of the listeners that were seen lately."""
    rows = database.query("select mode from chaz.listeners where seen_at > now() - interval '3 seconds' order by mode")
    return [row["mode"] for row in rows]


@pytest.mark.parametrize("fault", ["refuse", "freeze"])
def test_it_polls_when_only_its_ear_is_cut_off(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy], fault: str
) -> None:
    between = proxy(database.url, only="chaz-listen")
    processes.listener(listen_url=between.url, **SOON)
    processes.worker()
    with Chaz(database.url) as chaz:
        assert chaz.session("talk").direct("solo", "before").get(timeout=30) == "You said: before"
        {"refuse": between.refuse, "freeze": between.freeze}[fault]()
        eventually(lambda: modes(database) == ["polling"], within=30)

        assert chaz.session("talk").direct("solo", "meanwhile").get(timeout=30) == "You said: meanwhile"
        doctor = processes.start("doctor", [sys.executable, "-m", "chaz", "doctor"])
        doctor.exit_code()
        assert "1 polling; one that polls has lost its LISTEN connection" in doctor.said

        {"refuse": between.admit, "freeze": between.thaw}[fault]()
        eventually(lambda: modes(database) == ["listening"], within=30)
        assert chaz.session("talk").direct("solo", "after").get(timeout=30) == "You said: after"


def test_another_dispatches_while_one_is_cut_off(
    processes: Processes, database: ScratchDatabase, proxy: Callable[..., Proxy]
) -> None:
    between = proxy(database.url)
    first = processes.listener(database_url=between.url, **SOON)
    second = processes.listener(**SOON)
    processes.worker()
    with Chaz(database.url) as chaz:
        between.freeze()
        results = [chaz.session(f"s{n}").direct("solo", "meanwhile") for n in range(20)]
        assert [result.get(timeout=30) for result in results] == ["You said: meanwhile"] * 20
        eventually(lambda: "no answer for 2 s" in first.said, within=30)
        # The one that is cut off is not seen any more, and cannot say why.
        eventually(lambda: modes(database) == ["listening"], within=30)

        between.thaw()
        eventually(lambda: modes(database) == ["listening", "listening"], within=30)
        second.stop()
        assert chaz.session("talk").direct("solo", "after").get(timeout=30) == "You said: after"
