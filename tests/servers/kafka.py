"""A real Kafka broker: one node in KRaft mode, started from the jars of Maven."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import struct
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code

from relay.demo.processes import Server, free_port
from tests.servers.downloads import class_archive, kafka_jars
from tests.servers.missing import ServerMissing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Kafka"]

JAVA_MIN = 17
_CLUSTER_ID = "cmVsYXktdGVzdC1jbHVzdA"  # 16 bytes in base64, as the format tool wants it


def _require_java() -> None:
    java = shutil.which("java")
    printed = subprocess.run([java, "-version"], check=False, capture_output=True, text=True).stderr if java else ""
    version = re.search(r'version "(\d+)', printed)
    if version is None or int(version[1]) < JAVA_MIN:
        raise ServerMissing(f"Kafka: needs Java {JAVA_MIN} or newer; apt-get install default-jre-headless")


class Kafka(Server):
    """One broker that is its own controller. Topics are not created by asking for them.

    Clients follow the address that a broker advertises, past any proxy. So there is a second
    listener that advertises `proxied_port`, where a proxy to `behind_proxy_port` belongs.
    """

    name: ClassVar[str] = "kafka"
    start_seconds: ClassVar[float] = 120.0
    stop_seconds: ClassVar[float] = 30.0
    _formatted: ClassVar[dict[str, bytes]] = {}

    def __init__(self, *, settings: Mapping[str, object] | None = None) -> None:
        _require_java()
        self.jars = kafka_jars()
        super().__init__()
        self.behind_proxy_port = free_port()
        self.proxied_port = free_port()
        self._controller_port = free_port()
        self._own_settings = settings or {}
        self._dump_class_archive: Path | None = None

    @property
    def bootstrap_servers(self) -> str:
        """Where clients begin."""
        return f"{self.host}:{self.port}"

    @property
    def proxied_bootstrap_servers(self) -> str:
        """Where clients begin that shall go through a proxy, which the fixture `kafka_proxy` starts."""
        return f"{self.host}:{self.proxied_port}"

    def _settings(self) -> dict[str, object]:
        plain, proxied, controller = (
            f"{name}://{self.host}:{port}"
            for name, port in (
                ("PLAINTEXT", self.port),
                ("PROXIED", self.behind_proxy_port),
                ("CONTROLLER", self._controller_port),
            )
        )
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{self.host}:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": f"{plain},{proxied},{controller}",
            "advertised.listeners": f"{plain},PROXIED://{self.host}:{self.proxied_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.folder / "data",
            "auto.create.topics.enable": "false",
            "log.retention.ms": -1,  # by the records' own timestamps, and tests write old ones
            "num.network.threads": 2,
            "num.io.threads": 4,
            "background.threads": 2,
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            # A broker that was killed is let in again only when its old session is over (9 s by default).
            "broker.session.timeout.ms": 4000,
            "broker.heartbeat.interval.ms": 500,
            "group.initial.rebalance.delay.ms": 0,
            # Each partition allocates its index files in full: 10 MB each, and tests make many topics.
            "log.index.size.max.bytes": 65536,
            "log.cleaner.dedupe.buffer.size": 8_388_608,
            **self._own_settings,
        }

    def prepare(self) -> None:
        """Write the configuration and format the data folder."""
        lines = [f"{name}={value}\n" for name, value in self._settings().items()]
        (self.folder / "server.properties").write_text("".join(lines), encoding="utf-8")
        (self.folder / "log4j2.properties").write_text(
            "rootLogger.level=warn\nrootLogger.appenderRef.out.ref=out\n"
            "appender.out.type=Console\nappender.out.name=out\nappender.out.layout.type=PatternLayout\n"
            "appender.out.layout.pattern=[%d] %p %m (%c)%n\n",
            encoding="utf-8",
        )
        self._format()

    def _format(self) -> None:
        """Let the tool of Kafka format the first data folder of a run; later ones get the same files, 2 s earlier."""
        data = self.folder / "data"
        if not self._formatted:
            self.run(*self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", "server.properties"))
            files = [file for file in data.rglob("*") if file.is_file()]
            self._formatted.update({str(file.relative_to(data)): file.read_bytes() for file in files})
        for name, content in self._formatted.items():
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            if not (data / name).exists():
                (data / name).write_bytes(content)

    def _java(self, main_class: str, *arguments: str) -> list[str]:
        return [
            "java",
            # Seconds count here, not throughput over hours.
            *("-Xmx384m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *(() if main_class != "kafka.Kafka" else self._class_archive_options()),
            *("-Djava.net.preferIPv4Stack=true", f"-Dlog4j2.configurationFile={self.folder}/log4j2.properties"),
            *("-cp", f"{self.jars}/*", main_class, *arguments),
        ]

    def _class_archive_options(self) -> Sequence[str]:
        """Loading 9,000 classes is most of a start; an archive halves it. Java ignores one that does not fit."""
        if self._dump_class_archive is not None:
            return [f"-XX:ArchiveClassesAtExit={self._dump_class_archive}"]
        archive = class_archive()
        return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []

    @classmethod
    def prepare_class_archive(cls) -> None:
        """Start and stop a broker once that writes the archive when it ends; nothing if it is there."""
        archive = class_archive()
        if archive.exists():
            return
        broker = cls()
        half = broker._dump_class_archive = broker.folder / "classes.jsa"
        with broker:
            broker.stop()
            shutil.copyfile(half, archive.with_suffix(".half"))
            archive.with_suffix(".half").rename(archive)

    def command(self) -> Sequence[str | Path]:
        """The broker in the foreground."""
        return self._java("kafka.Kafka", "server.properties")

    def is_ready(self) -> bool:
        """It lists itself in its metadata: before that it is fenced, and refuses to lead partitions."""
        with contextlib.suppress(OSError, struct.error):
            return self._listed_brokers() > 0
        return False

    def _listed_brokers(self) -> int:
        """Ask for metadata of no topics, version 1 (https://kafka.apache.org/protocol#The_Messages_Metadata)."""
        request = struct.pack(">hhih4si", 3, 1, 7, 4, b"test", 0)
        with socket.create_connection((self.host, self.port), timeout=2) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = connection.makefile("rb").read(12)
        return int(struct.unpack(">iii", answer)[2])

    async def create_topic(self, name: str, *, partitions: int = 1, **config: object) -> str:
        """Create a topic and return its name; `max_message_bytes=2000` sets `max.message.bytes`."""
        configs = {key.replace("_", "."): str(value) for key, value in config.items()}
        async with self._admin() as admin:
            answer = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
        for _, code, *message in answer.topic_errors:
            if code:
                raise for_code(code)(f"{name}: {message}")
        return name

    async def topic_config(self, topic: str, name: str) -> str:
        """One setting of a topic, such as `max.message.bytes`."""
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: ""})
        async with self._admin() as admin:
            (answer,) = await admin.describe_configs([resource])
        return next(str(entry[1]) for entry in answer.resources[0][4])

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap_servers)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()
