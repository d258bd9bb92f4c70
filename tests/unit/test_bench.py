"""The pure parts of `relay bench`: figures, tables, charts, the workload. A benchmark itself is no test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.bench.accounts import cpu_seconds_of, rss_mb_of
from relay.bench.brokers import SINKS, Target
from relay.bench.clients import parsed
from relay.bench.contender import ContenderFailed, relay
from relay.bench.figures import median_of, paired_ratio, percentile
from relay.bench.report import Report, Table, shown, svg
from relay.bench.rig import Addresses, rig
from relay.bench.workload import HEADERS, payload
from relay.cli.commands.bench import bench
from relay.config import read
from relay.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

TABLE = Table("drain <null>", ("contender", "events/s"), (("raw | loop", 1000.0), ("relay", 870.5)), bars="events/s")


def test_a_ratio_is_taken_within_each_round() -> None:
    """The second round ran on a busy machine: both sides are slow in it, and the ratio is the same."""
    assert paired_ratio([80, 8], [100, 10]) == 0.8
    assert paired_ratio([80, 8], [100, 0]) == 0.8


def test_nothing_measured_is_zero() -> None:
    assert median_of([]) == 0
    assert percentile([], 99) == 0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([50, 90, 99, 100]))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


@pytest.mark.parametrize(
    ("cell", "text"), [(None, "-"), ("x", "x"), (12345.6, "12,346"), (12.34, "12.3"), (0.126, "0.13"), (0, "0")]
)
def test_cells_show_three_digits(cell: Any, text: str) -> None:
    assert shown(cell) == text


def test_a_report_is_written_in_all_its_forms(tmp_path: Path) -> None:
    report = Report("drain null", (TABLE,), "PostgreSQL 18", load_before=3.25)
    names = {path.suffix: path for path in report.write(tmp_path / "new")}
    assert orjson.loads(names[".json"].read_bytes())["tables"][0]["rows"][1] == ["relay", 870.5]
    markdown = names[".md"].read_text("utf-8")
    assert "load average 3.2 before" in markdown
    assert "| raw \\| loop | 1,000 |" in markdown
    assert f"({names['.svg'].name})" in markdown


def test_the_longest_bar_belongs_to_the_largest_value() -> None:
    """The chart is well-formed, whatever the texts hold."""
    root = ET.fromstring(svg(TABLE))
    raw_width, relay_width = (float(rect.attrib["width"]) for rect in root if rect.tag.endswith("rect"))
    assert relay_width == pytest.approx(raw_width * 0.8705, abs=0.1)


def test_an_event_is_about_200_bytes_of_json_and_has_two_headers() -> None:
    text = payload(123_456)
    assert 180 <= len(text) <= 230
    assert orjson.loads(text)["customer"] == "customer-456"
    assert len(orjson.loads(HEADERS)) == 2


def test_pgbench_is_understood_or_its_words_are_shown() -> None:
    output = "number of transactions actually processed: 6864\ntps = 3432.5 (without initial connection time)\n"
    assert parsed(output).per_second == 3432.5
    with pytest.raises(ContenderFailed, match="no such role"):
        parsed("FATAL: no such role")


@pytest.mark.parametrize("sink", SINKS)
def test_the_relay_accepts_the_configuration_that_it_is_measured_with(sink: str, tmp_path: Path) -> None:
    options = {"redis": {"url": "redis://h"}, "rabbitmq": {"url": "amqp://h"}, "kafka": {"bootstrap_servers": "h:9092"}}
    contender = relay("postgresql://u@h/d", Target(sink, options.get(sink, {}), "t"), 1234, settle="keep")
    path = tmp_path / "relay.toml"
    path.write_text(contender.files["relay.toml"], "utf-8")
    config = read(path, {}, {}).config
    assert config.sinks["bench"].type == sink
    assert config.source.polling.settle == "keep"


async def test_brokers_that_are_not_ours_need_an_address() -> None:
    for sink in ("kafka", "rabbitmq"):
        with pytest.raises(InvalidConfig, match=sink if sink == "rabbitmq" else "Kafka"):
            async with rig(Addresses(dsn="postgresql://nowhere/x"), sink):
                pass


def test_a_process_is_accounted_for() -> None:
    before = cpu_seconds_of(os.getpid())
    sum(range(300_000))
    assert cpu_seconds_of(os.getpid()) > before
    assert rss_mb_of(os.getpid(), peak=True) > 1
    assert rss_mb_of(os.getpid()) > 1
    assert cpu_seconds_of(2**22 + 1) == 0


def test_every_sub_command_has_help() -> None:
    assert set(bench.commands) == {"drain", "latency", "producers", "idle", "growth", "memory"}
