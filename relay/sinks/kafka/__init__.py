"""The Kafka sink.

Modules, each below the one before: `sink` (the contract), `delivery` (one published batch, its order and
outcomes), `attempt` (one record batch until its fate is known), `cluster` (brokers and requests), `topics`
(partitions and leaders), `records`, `pace`, `answers` (the table of errors), `partitioner`, `options`, `wire` (what
we use of aiokafka).
"""

from relay.sinks.kafka.options import KafkaOptions
from relay.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaOptions", "KafkaSink"]
