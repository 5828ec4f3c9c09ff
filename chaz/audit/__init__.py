"""The audit trail: told by runs through the broker, recorded by consumers of its own, never asked by a run."""
