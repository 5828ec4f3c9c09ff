"""The demo: a researcher and its readers, three texts, and a tree of sessions that is shown as it grows."""
