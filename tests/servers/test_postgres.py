"""The test environment itself: what the fixtures promise about PostgreSQL."""

from __future__ import annotations

import psycopg
import pytest

from tests.servers.postgres import Database, Postgres


def test_a_database_is_empty_and_is_gone_afterwards(postgres: Postgres, unique: str) -> None:
    """Even with a connection still open and a replication slot in it."""
    with Database(postgres, unique) as database:
        assert database.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
        database.execute("SELECT pg_create_logical_replication_slot('left_over', 'pgoutput')")
        left_open = psycopg.connect(database.dsn)
    left_open.close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(database.dsn)


def test_a_killed_cluster_starts_again_with_its_rows(own_postgres: Postgres) -> None:
    """SIGKILL of every process loses nothing that was committed."""
    own_postgres.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    own_postgres.kill9()
    assert not own_postgres.running
    own_postgres.start()
    assert own_postgres.execute("SELECT answer FROM kept") == [(42,)]


def test_every_supported_version_is_there(any_database: Database, request: pytest.FixtureRequest) -> None:
    """The matrix really runs the version that it names, with what the slot mode needs."""
    (version,) = any_database.execute("SELECT current_setting('server_version_num')::int / 10000")[0]
    assert f"[{version}]" in request.node.name
    assert any_database.execute("SHOW wal_level") == [("logical",)]


def test_a_frozen_cluster_lets_connections_wait(own_postgres: Postgres) -> None:
    """Nothing answers while it is frozen; the connection lives on afterwards."""
    with psycopg.connect(own_postgres.superuser_dsn) as connection:
        own_postgres.freeze()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(own_postgres.superuser_dsn, connect_timeout=2)
        own_postgres.thaw()
        assert connection.execute("SELECT 1").fetchone() == (1,)
