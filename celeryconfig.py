"""What a deployment sets of Celery, for the workers and Flower; chaz's own choices are the defaults shown here.

Celery finds this module in the working directory, or by CELERY_CONFIG_MODULE. Uncomment what you change.
chaz's own settings (database, broker, agents, leases) are environment variables: see the README.
"""

# Broker ---------------------------------------------------------------------------------------------------------------
# Where the broker is, is CHAZ_BROKER_URL, because listener and audit consumer need it too.
# broker_heartbeat = 120

# Pool -----------------------------------------------------------------------------------------------------------------
# Agents wait on models, so one process runs many of them in threads. "prefork" is for tools that hold the GIL or take
# their process down; then set worker_concurrency to the number of cores. Celery's own `-P prefork` does not win over
# what is configured; `chaz worker --pool prefork` does.
# worker_pool = "threads"
# worker_concurrency = 100

# Limits ---------------------------------------------------------------------------------------------------------------
# Only the prefork pool knows them. A child is replaced after so many runs, or past so many KiB:
# worker_max_tasks_per_child = 1000
# worker_max_memory_per_child = 400_000

# Queues ---------------------------------------------------------------------------------------------------------------
# A worker consumes the queues of the agents that its CHAZ_AGENTS define. An agent's queue is set where it is defined:
# Agent("researcher", queue="heavy", …). `celery -A chaz worker -Q chaz.heavy` serves some of them only.

# Watching -------------------------------------------------------------------------------------------------------------
# worker_send_task_events = True
# task_send_sent_event = False
