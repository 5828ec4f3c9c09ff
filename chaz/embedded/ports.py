"""Free ports on loopback."""

from __future__ import annotations

import random
import socket

from chaz.errors import EmbeddedError

# Below the ports that systems give to outgoing connections: ours stays free between two starts.
RANGE = range(15_000, 30_000)


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        # Servers set it too: connections of the last start that linger do not take the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that is free now; another process may still be faster."""
    # Not the shared generator: seeded programs would all try the same ports.
    for port in random.SystemRandom().sample(RANGE, 200):
        if is_free(port):
            return port
    raise EmbeddedError(f"no free port on 127.0.0.1 between {RANGE.start} and {RANGE.stop}")
