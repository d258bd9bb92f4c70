"""Redis Streams: one XADD for each event, one transaction for each stream and batch, one write for each batch.

- `options`     what an operator can set, and the address
- `encoding`    a message as the bytes of its XADD (pure)
- `rounds`      which messages of a batch may be sent together (pure)
- `request`     one round as the bytes of its transactions
- `pace`        how much of a batch goes into a round (pure)
- `attempt`     what is known about each message of a batch
- `replies`     what the replies say about each message (pure)
- `errors`      what an error reply means: the one table (pure)
- `connection`  one connection: handshake, one write, replies read in bulk
- `pool`        connections that nobody uses, and the fence around those that were given up
- `sink`        the contract of `relay.sink` made of these

Works with Redis 6.2 and newer, and Valkey. The client library is hiredis alone: what `redis.asyncio` would
add, its retries and its pool, is what PROTOCOLS.md 21 forbids, and its transport is private.
"""

from relay.sinks.redis.options import RedisOptions
from relay.sinks.redis.sink import RedisSink

__all__ = ["RedisOptions", "RedisSink"]
