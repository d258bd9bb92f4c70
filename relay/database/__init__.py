"""PostgreSQL: names of the objects, sessions, and the pool. Raises nothing but `relay.errors`."""
