"""The null sink confirms everything."""

from __future__ import annotations

from relay.sink import CONFIRMED, Sink
from relay.sinks.null import NullOptions, NullSink
from relay.testing.messages import make_messages


async def test_it_confirms_each_message_and_is_a_sink() -> None:
    """Open, ping, publish, close, close."""
    sink = NullSink("null", NullOptions(concurrency=2))
    assert isinstance(sink, Sink)
    assert sink.concurrency == 2
    await sink.open()
    await sink.ping()
    assert list(await sink.publish(make_messages("d", 3))) == [CONFIRMED] * 3
    assert list(await sink.publish([])) == []
    await sink.close()
    await sink.close()
