"""What is too long for a test: a soak, and what it needs."""
