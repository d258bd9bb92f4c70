"""What stands in deploy/ and in the documents is understood by the relay of today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest

from relay import config
from relay.sinks import registry
from relay.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def text(path: str) -> str:
    return (DEPLOY / path).read_text(encoding="utf-8")


def kubernetes_variables(manifest: str) -> dict[str, str]:
    """The `env` entries of a manifest."""
    return dict(re.findall(r"- name: (RELAY_\w+)\n\s+value: (\S+)", text(manifest)))


def secret_values() -> dict[str, str]:
    """Keys of the example secret."""
    return dict(re.findall(r"^  ([\w-]+): (\S+://\S+)$", text("kubernetes/secret.yaml"), re.MULTILINE))


def mounted(variables: dict[str, str], folder: Path) -> dict[str, str]:
    """The same variables with the mounted files in a folder of the test's; a file that no key makes is missing."""
    for key, value in secret_values().items():
        (folder / key).write_text(value)
    (folder / "relay.toml").write_text(text("kubernetes/relay.toml"))
    return {name: str(folder / Path(value).name) for name, value in variables.items()}


def test_the_deployments_settings_are_valid_with_sinks_that_can_be_made(tmp_path: Path) -> None:
    """relay.toml, variables and secrets together; nothing in them is unsure."""
    loaded = config.read(None, mounted(kubernetes_variables("kubernetes/deployment.yaml"), tmp_path))
    assert loaded.config.database.dsn.get_secret_value() == secret_values()["dsn"]
    assert {name: registry.create(name, section) for name, section in loaded.config.sinks.items()}
    assert not loaded.warnings


def test_the_migration_connects_as_the_owner(tmp_path: Path) -> None:
    """It needs a DSN only."""
    variables = mounted(kubernetes_variables("kubernetes/migrate.yaml"), tmp_path)
    loaded = config.read(None, variables, sinks_required=False)
    assert loaded.config.database.dsn.get_secret_value() == secret_values()["owner-dsn"]


def test_every_mounted_key_is_a_key_of_the_secret() -> None:
    """A missing key would keep the pod from starting."""
    keys = {
        key
        for manifest in ("deployment", "migrate")
        for key in re.findall(r"\{key: ([\w-]+),", text(f"kubernetes/{manifest}.yaml"))
    }
    assert keys == set(secret_values())


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("kubernetes/deployment.yaml", r"terminationGracePeriodSeconds: (\d+)"),
        ("compose.yaml", r"stop_grace_period: (\d+)s"),
    ],
)
def test_a_pod_is_given_more_time_than_it_takes(path: str, pattern: str) -> None:
    """SIGKILL before the end of the grace period would turn what is in flight into repeats."""
    (given,) = re.findall(pattern, text(path))
    assert int(given) > config.Pipeline().grace_seconds
    assert "grace_seconds = 20.0" in text("kubernetes/relay.toml")


def test_the_variables_of_compose_are_valid() -> None:
    """The environment alone is enough."""
    variables = dict(re.findall(r"^    (RELAY_\w+): (\S+)$", text("compose.yaml"), re.MULTILINE))
    assert config.load(None, variables).sinks["main"].type == "redis"


def test_every_metric_of_the_alerts_and_documents_exists() -> None:
    """An alert on a metric that nobody exports never fires."""
    metrics = Metrics(("main",))
    exported = set(re.findall(r"^# TYPE (\w+) ", generate_latest(metrics.registry).decode(), re.MULTILINE))
    for path in [DEPLOY / "alerts.yaml", *DOCUMENTS]:
        queries = re.findall(r"(?:^|[^\w.])(relay_[a-z_]+)\s*(?:[\[)>=<{]|\{)", path.read_text(encoding="utf-8"))
        assert not {name for name in queries if _base(name) not in exported}, path


def _base(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_every_alert_has_its_section_in_troubleshooting() -> None:
    """Whoever is woken by an alert finds its name."""
    alerts = set(re.findall(r"alert: (\w+)", text("alerts.yaml")))
    sections = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert alerts <= set(re.findall(r"^## .*?(\w+)$", sections, re.MULTILINE))


def complete_settings() -> Iterable[tuple[str, str]]:
    """TOML blocks of the documents that are a whole relay.toml."""
    for path in DOCUMENTS:
        for block in re.findall(r"^```toml\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            if "[sinks." in block and "pigeon" not in block:
                yield path.name, block


def test_the_settings_in_the_documents_are_valid(tmp_path: Path) -> None:
    """Whoever copies them gets no error."""
    blocks = list(complete_settings())
    assert len(blocks) > 3
    for number, (_, block) in enumerate(blocks):
        dsn = {} if "dsn =" in block else {"RELAY_DATABASE__DSN": "postgresql://localhost/shop"}
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        for name, section in config.load(file, dsn).sinks.items():
            registry.create(name, section)


def test_every_test_that_the_documents_name_exists() -> None:
    """A promise that is said to be tested is tested."""
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "relay" / "testing").rglob("*.py")]
    exist = {name for path in sources for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    for path in DOCUMENTS:
        named = set(re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")))
        assert named <= exist, f"{path}: {named - exist}"
