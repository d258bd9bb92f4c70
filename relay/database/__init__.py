"""Access to PostgreSQL: names of objects, SQL text, connections."""
