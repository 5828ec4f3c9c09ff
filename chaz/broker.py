"""What chaz has on the broker: a topic exchange with one queue per agent, and the audit trail's two queues.

RabbitMQ's queues are quorum queues; Redis and Valkey ignore the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from kombu import Connection, Exchange, Queue

from chaz.channels import AUDIT, AUDIT_DEAD, DEFAULT, RUNS, broker_name
from chaz.errors import BrokerUnavailable, ConfigurationError
from chaz.settings import Settings, without_secrets

PERSISTENT_DELIVERY_MODE = 2
DAY = 86_400
AUDIT_AGAIN_AFTER = 10
SEND_WITHIN = 10
DELIVERY_LIMIT = 20
DEAD_LETTERS_KEPT = 100_000


def transport_options(settings: Settings) -> dict[str, Any]:
    """Kombu's options for every connection of chaz.

    PostgreSQL rescues runs, not the broker; so its own redelivery by time is put off to a day.
    """
    if forgets_bindings(settings):
        return {
            "global_keyprefix": f"{settings.broker_prefix}:",
            "visibility_timeout": DAY,
            # A connection that was cut without a word is noticed and replaced.
            "socket_timeout": 15,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
            "unacked_restore_limit": 1000,
        }
    return {"confirm_publish": True}


def audit_options(settings: Settings) -> dict[str, Any]:
    """Kombu's options for an audit consumer: on Redis, what a killed one had taken is delivered again soon.

    A batch is recorded in far less time, and recording twice does nothing. The keys are its own, because a consumer
    looks after all that lies under them, and a run may take long.
    """
    options = transport_options(settings)
    if "visibility_timeout" in options:
        options |= {
            "visibility_timeout": AUDIT_AGAIN_AFTER,
            "unacked_mutex_expire": AUDIT_AGAIN_AFTER,
            **{f"unacked_{name}key": f"{AUDIT}.unacked_{name}key" for name in ("", "index_", "mutex_")},
        }
    return options


def sender_options(settings: Settings) -> dict[str, Any]:
    """Kombu's options for a connection that only sends: a broker that is silent is given up after a while."""
    options = transport_options(settings)
    if forgets_bindings(settings):
        return options
    return options | {"read_timeout": SEND_WITHIN, "write_timeout": SEND_WITHIN}


def forgets_bindings(settings: Settings) -> bool:
    """Whether a flush of the broker takes exchanges and bindings away under open connections.

    Kombu keeps them as keys in Redis, declares them once per connection, and drops in silence what finds none.
    """
    return settings.broker_url.startswith(("redis", "rediss", "sentinel"))


def connect(settings: Settings, options: dict[str, Any] | None = None, *, heartbeat: int = 30) -> Connection:
    """A connection to the broker, opened when first used."""
    return Connection(
        settings.broker_url,
        connect_timeout=5,
        heartbeat=heartbeat,
        transport_options=options or transport_options(settings),
    )


def check(settings: Settings) -> None:
    """Raise BrokerUnavailable unless the broker lets us in, ConfigurationError where its driver is missing."""
    try:
        with connect(settings) as connection:
            connection.ensure_connection(max_retries=1, interval_start=1, timeout=10)
    except ImportError as error:
        extra = "redis" if forgets_bindings(settings) else "worker"
        raise ConfigurationError(
            f"the broker at {without_secrets(settings.broker_url)} needs a package that is not installed ({error}); "
            f"install it with: pip install 'chaz[{extra}]'"
        ) from error
    except Exception as error:
        # Each transport has its own errors.
        raise BrokerUnavailable(without_secrets(settings.broker_url), " ".join(str(error).split())) from error


def declare(settings: Settings, queues: Iterable[Queue]) -> None:
    """Declare queues. Raises ConfigurationError for one that is there and was declared in another way.

    Raises BrokerUnavailable for a broker that is lost meanwhile.
    """
    connection = connect(settings)
    try:
        with connection:
            for queue in queues:
                try:
                    queue(connection.default_channel).declare()
                except connection.channel_errors as error:
                    raise ConfigurationError(f"the broker refuses the queue {queue.name}: {error}") from error
    except connection.connection_errors as error:
        raise BrokerUnavailable(without_secrets(settings.broker_url), " ".join(str(error).split())) from error


def queue_length(settings: Settings, queue: Queue) -> int:
    """How many deliveries wait in the queue; 0 if it is not there."""
    with connect(settings) as connection:
        try:
            # Kombu does not find a prefixed queue in Redis when asked passively; there, asking makes nothing.
            declared = cast("Any", connection.default_channel).queue_declare(
                queue.name, passive=not forgets_bindings(settings)
            )
        except connection.channel_errors:
            return 0
        return declared.message_count


def run_queue(prefix: str, queue: str) -> Queue:
    """The queue that an agent is served from."""
    return Queue(
        broker_name(prefix, queue),
        Exchange(broker_name(prefix, RUNS), type="topic", durable=True),
        routing_key=queue,
        durable=True,
        queue_arguments={
            "x-queue-type": "quorum",
            "x-delivery-limit": DELIVERY_LIMIT,
            "x-consumer-timeout": DAY * 1000,
        },
    )


def default_queue(prefix: str) -> Queue:
    """Where Celery puts tasks that name no queue: steps of chains, and a deployment's own tasks."""
    name = broker_name(prefix, DEFAULT)
    return Queue(
        name,
        Exchange(name, type="topic", durable=True),
        routing_key=name,
        durable=True,
        queue_arguments={"x-queue-type": "quorum"},
    )


def audit_queue(prefix: str) -> Queue:
    """Where runs tell their events."""
    name = broker_name(prefix, AUDIT)
    return Queue(
        name,
        Exchange(name, type="topic", durable=True),
        routing_key=AUDIT,
        durable=True,
        queue_arguments={"x-queue-type": "quorum"},
    )


def dead_letter_queue(prefix: str) -> Queue:
    """Where the audit consumer puts what it cannot record, with the reason; bounded."""
    name = broker_name(prefix, AUDIT_DEAD)
    return Queue(
        name,
        Exchange(name, type="topic", durable=True),
        routing_key=AUDIT_DEAD,
        durable=True,
        queue_arguments={"x-queue-type": "quorum", "x-max-length": DEAD_LETTERS_KEPT},
    )
