"""What runs an agent: its definition, its tools, its model, the context it sees, the loop. No broker, no database."""
