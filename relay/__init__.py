"""Transactional outbox relay: PostgreSQL rows to brokers, in order per key, settled once confirmed."""

__version__ = "0.1.0"
__all__ = ["__version__"]
