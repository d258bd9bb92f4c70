"""The test environment itself: what the fixtures promise about brokers and the pooler."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aio_pika
import asyncpg
import pytest
import redis.asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import TopicAlreadyExistsError

if TYPE_CHECKING:
    from tests.servers.kafka import Kafka
    from tests.servers.pgbouncer import PgBouncer
    from tests.servers.proxy import Proxy
    from tests.servers.rabbitmq import RabbitMQ
    from tests.servers.redis import Redis, Valkey


async def publish_and_read(bootstrap_servers: str, topic: str) -> object:
    """Send one record and read the topic's first."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers) as producer:
        await producer.send_and_wait(topic, b"hello")
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest", group_id=None
    ) as consumer:
        return (await consumer.getone()).value


async def test_a_record_comes_out_of_kafka(kafka: Kafka, unique: str) -> None:
    await kafka.create_topic(unique, partitions=2)
    assert await publish_and_read(kafka.bootstrap_servers, unique) == b"hello"


async def test_a_topic_has_the_settings_it_was_made_with(kafka: Kafka, unique: str) -> None:
    await kafka.create_topic(unique, max_message_bytes=2000)
    assert await kafka.topic_config(unique, "max.message.bytes") == "2000"


async def test_creating_a_topic_twice_is_an_error(kafka: Kafka, unique: str) -> None:
    await kafka.create_topic(unique)
    with pytest.raises(TopicAlreadyExistsError):
        await kafka.create_topic(unique)


async def test_clients_of_the_proxied_listener_stay_behind_the_proxy(
    kafka: Kafka, kafka_proxy: Proxy, unique: str
) -> None:
    """The broker advertises the proxy, so that metadata does not lead around it."""
    await kafka.create_topic(unique)
    await publish_and_read(kafka.proxied_bootstrap_servers, unique)
    assert kafka_proxy.connections >= 2
    assert kafka_proxy.bytes_to_server > 100


async def test_a_vhost_is_fresh_and_gone_afterwards(rabbitmq: RabbitMQ, unique: str) -> None:
    rabbitmq.add_vhost(unique)
    async with await aio_pika.connect(rabbitmq.url(unique)) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        await channel.default_exchange.publish(aio_pika.Message(b"hello"), "q")
        message = await queue.get()
        assert message.body == b"hello"
        await message.ack()
    rabbitmq.delete_vhost(unique)
    assert unique not in str(rabbitmq.api("GET", "/api/vhosts"))


async def test_redis_and_valkey_are_two_servers(redis_server: Redis, valkey: Valkey) -> None:
    names = []
    for server in (redis_server, valkey):
        async with redis.asyncio.Redis.from_url(server.url) as client:
            names.append((await client.info("server")).get("server_name", "redis"))
    assert names == ["redis", "valkey"]


async def test_a_frozen_server_does_not_answer_until_it_is_thawed(own_redis: Valkey) -> None:
    async with redis.asyncio.Redis.from_url(own_redis.url) as client:
        await client.ping()
        own_redis.freeze()
        answer = asyncio.ensure_future(client.ping())
        done, _ = await asyncio.wait([answer], timeout=0.2)
        assert not done
        own_redis.thaw()
        assert await answer


async def test_the_pooler_hands_out_server_connections_by_transaction(pgbouncer: PgBouncer) -> None:
    """Two clients share a server connection one after the other; within a transaction it is one's own."""
    first = await asyncpg.connect(pgbouncer.dsn, statement_cache_size=0)
    second = await asyncpg.connect(pgbouncer.dsn, statement_cache_size=0)
    try:
        pid = await first.fetchval("SELECT pg_backend_pid()")
        assert await second.fetchval("SELECT pg_backend_pid()") == pid
        async with first.transaction():
            mine = await first.fetchval("SELECT pg_backend_pid()")
            assert await second.fetchval("SELECT pg_backend_pid()") != mine
    finally:
        await first.close()
        await second.close()


async def test_the_pooler_knows_every_role(pgbouncer: PgBouncer, unique: str) -> None:
    pgbouncer.database.execute(f"CREATE ROLE {unique} LOGIN PASSWORD 'secret'")
    try:
        connection = await asyncpg.connect(pgbouncer.dsn_of(unique, "secret"), statement_cache_size=0)
        assert await connection.fetchval("SELECT current_user") == unique
        await connection.close()
    finally:
        pgbouncer.database.execute(f"DROP ROLE {unique}")
