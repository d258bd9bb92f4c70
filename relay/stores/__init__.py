"""The tables that a pod writes, on PostgreSQL: implementations of `relay.store`, and the dead letters of an operator."""
