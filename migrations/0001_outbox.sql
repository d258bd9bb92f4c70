-- What applications use: the outbox itself, ids for it, and a function to publish with.

-- A UUIDv7 with 12 bits of the millisecond's fraction, like the built-in one of PostgreSQL 18.
-- One expression, so that the planner inlines it into the column's default: no function call per row.
CREATE FUNCTION {uuidv7}() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE
--@if uuidv7_builtin
RETURN pg_catalog.uuidv7();
--@else
-- 60 bits of time as 15 hex digits, the version digit put before the last three; variant and the
-- rest come from a random UUID. float8 is exact here until 2039 and loses single microseconds after.
RETURN (overlay(
            lpad(to_hex(floor(date_part('epoch', clock_timestamp()) * 4096000)::bigint), 15, '0')
            PLACING '7' FROM 13 FOR 0)
        || substr(gen_random_uuid()::text, 20))::uuid;
--@end

-- Columns are ordered so that no padding lies between them: 8-byte columns, id, lane, then text.
CREATE TABLE {outbox} (
    -- CACHE 1: with a cache, a later transaction of another session takes a lower number (PROTOCOLS.md 8)
    seq          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME {outbox_seq} CACHE 1),
    xid          bigint      NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    created_at   timestamptz NOT NULL DEFAULT now(),
    stored_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    id           uuid        NOT NULL DEFAULT {uuidv7}(),
    published_at timestamptz NULL,
    lane         smallint    NOT NULL GENERATED ALWAYS AS (
                     (coalesce(hashtextextended(key COLLATE "C", 0), uuid_hash_extended(id, 0)) & 63)::smallint
                 ) STORED,
    topic        text        NOT NULL,
    key          text        NULL,
    payload      {payload_type} NULL,
    headers      jsonb       NULL,
    CONSTRAINT {outbox_headers_object} CHECK (jsonb_typeof(headers) = 'object'),
--@if partitioned
    CONSTRAINT {outbox_pkey} PRIMARY KEY (seq, stored_at)
) PARTITION BY RANGE (stored_at);
--@else
    CONSTRAINT {outbox_pkey} PRIMARY KEY (seq)
) WITH ({outbox_storage});
--@end

-- What is not settled, by lane in order: the hot read of the relay. Settled rows leave it.
CREATE INDEX {outbox_pending} ON {outbox} (lane, seq) WHERE published_at IS NULL;

-- Rows between two snapshots (PROTOCOLS.md 13); a few kB, and nothing to do for an insert at the end of the table.
CREATE INDEX {outbox_xid} ON {outbox} USING brin (xid) WITH (pages_per_range = 32);

-- SECURITY INVOKER: the caller's own grants decide. The id is made first, because INSERT ... RETURNING
-- would need SELECT on the column, and applications read nothing.
CREATE FUNCTION {publish}(
    topic   text,
    payload {payload_type},
    key     text  DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    id      uuid  DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql VOLATILE SECURITY INVOKER AS
$body$
DECLARE
    event_id uuid NOT NULL := coalesce($5, {uuidv7}());
BEGIN
    INSERT INTO {outbox} (id, topic, key, payload, headers) VALUES (event_id, $1, $3, $2, $4);
    RETURN event_id;
END
$body$;
