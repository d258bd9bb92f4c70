"""RabbitMQ: a message is confirmed when the broker has confirmed it and has not returned it (PROTOCOLS.md 20)."""

from relay.sinks.rabbitmq.options import RabbitMQOptions
from relay.sinks.rabbitmq.sink import RabbitMQSink

__all__ = ["RabbitMQOptions", "RabbitMQSink"]
