"""Sinks: one broker each. They are made by `relay.sinks.registry` and imported only when they are used."""
