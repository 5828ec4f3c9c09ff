"""What has to be true after the soak, asked of the database."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString

import psycopg

# Each counts what must not be there.
FAULTS: dict[str, LiteralString] = {
    "doubled": """
        select count(*) from (
            select run_id from chaz.entries where type in ('message', 'error') and seq = 0 and run_id is not null
                and author in ('agent', 'system') group by run_id having count(*) > 1) x""",
    "unanswered": """
        select count(*) from chaz.runs r where state in ('succeeded', 'failed') and not exists (
            select from chaz.entries e where e.run_id = r.id and type in ('message', 'error')
                and author in ('agent', 'system'))""",
    "finished tools repeated": """
        select count(*) from (
            select key from effects join chaz.calls c on key = c.run_id || ':' || c.step || ':' || c.ordinal
            where not idempotent and c.outcome = 'ok'
            group by key, c.ended_at having count(*) > 1 or max(at) > c.ended_at) x""",
    "non-idempotent tools repeated": """
        select count(*) from (
            select key from effects where not idempotent group by key having count(*) > 1) x""",
    "finished tools without effect": """
        select count(*) from chaz.calls c where tool in ('record_effect', 'record_again') and outcome = 'ok'
            and not exists (select from effects where key = c.run_id || ':' || c.step || ':' || c.ordinal)""",
    "stored turns repeated": """
        select count(*) from chaz.steps s where exists (
            select from chaz.calls c where c.run_id = s.run_id and c.step = s.step and c.started_at < s.created_at)""",
    "events without a call": """
        select count(*) from chaz.runs r where event_seq <> (
            select count(*) + count(result_seq) from chaz.calls c where c.run_id = r.id)""",
    "steps not gapless": """
        select count(*) from chaz.runs r where steps <> (
            select count(*) from chaz.steps s where s.run_id = r.id and s.step < r.steps)""",
    "sessions left busy": "select count(*) from chaz.heads where active_run is not null",
    "positions not gapless": """
        select count(*) from chaz.heads h left join (
            select session_id, count(*) as n, max(position) as last from chaz.entries
            where seq = 0 and position is not null group by session_id) e using (session_id)
        where coalesce(n, 0) <> next_position - 1 or coalesce(last, 0) <> next_position - 1""",
    "unplaced entries": "select count(*) from chaz.entries where position is null",
    "open calls": "select count(*) from chaz.calls where state = 'started'",
    "open waits": "select count(*) from chaz.waits where answer is null",
    "failed by crash limit": "select count(*) from chaz.runs where state = 'failed' and reason = 'crashes'",
    "failed otherwise": "select count(*) from chaz.runs where state = 'failed' and reason <> 'crashes'",
}

NUMBERS: dict[str, LiteralString] = {
    "runs with children": "select count(*) from chaz.runs",
    "superseded": "select count(*) from chaz.runs where state = 'superseded'",
    "attempts above the first": "select coalesce(sum(attempt - 1), 0) from chaz.runs where state <> 'superseded'",
    "calls": "select count(*) from chaz.calls",
    "calls that failed": "select count(*) from chaz.calls where outcome not in ('ok', 'unknown')",
    "calls that may have run": "select count(*) from chaz.calls where outcome = 'unknown'",
    "idempotent tools repeated": """
        select count(*) from (select key from effects where idempotent group by key having count(*) > 1) x""",
    "effects": "select count(*) from effects",
    "highest crashes": "select coalesce(max(crashes), 0) from chaz.runs",
}

EFFECTS = """
    create table effects (name text, key text, idempotent boolean, pid int, at timestamptz);
    create index on effects (key)
"""
UNFINISHED = """
    select (select count(*) from chaz.entries where position is null)
        + (select count(*) from chaz.runs where state in ('pending', 'queued', 'running', 'parked'))
"""
IN_WORDS = """
    select 'run ' || r.id || ' ' || agent || ' ' || state || ' attempt ' || attempt || ' crashes ' || crashes
        || ' publishes ' || publishes || ' publish_after ' || publish_after || ' not_before '
        || coalesce(not_before::text, '-') || ' waits_for ' || coalesce(waits_for, '-')
        || ' active ' || coalesce(h.active_run::text, '-')
    from chaz.runs r left join chaz.heads h using (session_id)
    where state in ('pending', 'queued', 'running', 'parked')
    union all select 'entry ' || id || ' is not placed' from chaz.entries where position is null limit 20
"""
FAILED = """
    select 'run ' || id || ' ' || agent || ' failed, ' || coalesce(reason, '') || ': ' || coalesce(result, '')
        || ' (attempt ' || attempt || ', crashes ' || crashes || ', steps ' || steps || ')'
    from chaz.runs where state = 'failed' limit 20
"""


class Questions:
    """Asks the database, on a connection that is made again when it is lost."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection | None = None

    def ask(self, query: LiteralString) -> list[tuple[Any, ...]]:
        """The rows of a query; tried again for as long as a recovery may take."""
        ends = time.monotonic() + 60
        while True:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = psycopg.connect(self._url, autocommit=True, application_name="soak")
                cursor = self._connection.execute(query)
                return cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:
                if time.monotonic() > ends:
                    raise
                self.close()
                time.sleep(0.2)

    def count(self, query: LiteralString) -> int:
        """One number."""
        return int(self.ask(query)[0][0])

    def load_effects(self, file: Path) -> None:
        """Make a table of the lines that tools left."""
        self.ask(EFFECTS)
        assert self._connection is not None
        with self._connection.cursor() as cursor, cursor.copy("copy effects from stdin") as copy, open(file) as lines:
            for name, key, idempotent, pid, at in map(json.loads, lines):
                copy.write_row((name, key, idempotent, pid, datetime.fromtimestamp(at, UTC)))

    def unfinished(self) -> list[str]:
        """Some of the runs and entries that are not over, in words."""
        return [row[0] for row in self.ask(IN_WORDS)]

    def failures(self) -> list[str]:
        """Some of the runs that failed, in words."""
        return [row[0] for row in self.ask(FAILED)]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
