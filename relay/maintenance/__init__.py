"""Looking after the outbox: what an operator sees of it."""
