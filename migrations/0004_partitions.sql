-- Partitions ahead of time (PROTOCOLS.md 18). A plain outbox has nothing to do here.

--@if partitioned
-- Makes the partitions that are missing until now + ahead, and returns their names. It takes no lock that
-- an insert waits for: CREATE TABLE (LIKE) and ATTACH, never PARTITION OF, which locks the parent exclusively.
-- A new table is empty, so ATTACH has nothing to scan and needs no CHECK constraint that producers would pay for.
--
-- SECURITY DEFINER, because only the owner may attach: the relay's role may call this and own nothing.
CREATE FUNCTION {ensure_partitions}(step interval, ahead interval) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '5s' AS
$body$
DECLARE
    parent  CONSTANT regclass := {outbox_literal};
    unit    CONSTANT text := CASE step WHEN '1 day' THEN 'day' WHEN '7 days' THEN 'week' END;
    starts  timestamptz;
    ends    timestamptz;
    part    text;
    granted record;
BEGIN
    IF unit IS NULL THEN
        RAISE EXCEPTION 'a partition spans 1 day or 7 days, not %', step USING ERRCODE = 'invalid_parameter_value';
    ELSIF ahead IS NULL OR ahead NOT BETWEEN interval '0' AND interval '400 days' THEN
        RAISE EXCEPTION 'partitions are made 0 to 400 days ahead, not %', ahead USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- Another pod is at it. Tried, not waited for: nobody's transaction queues up here.
    IF NOT pg_try_advisory_xact_lock({partitions_key}) THEN
        RETURN;
    END IF;

    SELECT max(substring(pg_get_expr(c.relpartbound, c.oid) FROM $re$ TO \('([^']+)'\)$re$)::timestamptz)
      INTO starts
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = parent;
    -- The first one starts a step early: a server that takes over may have a clock that is a little behind.
    -- Where the last range ended in the past, the gap stays: stored_at is the server's clock, never older.
    starts := CASE WHEN starts IS NULL THEN date_trunc(unit, clock_timestamp(), 'UTC') - step
                   ELSE greatest(starts, date_trunc(unit, clock_timestamp(), 'UTC')) END;

    WHILE starts < clock_timestamp() + ahead LOOP
        ends := date_trunc(unit, starts, 'UTC') + step;
        part := format('%I.%I', {schema_name}, {outbox_name} || to_char(starts, '"_"YYYYMMDD'));
        EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY) WITH ({outbox_storage})', part, parent);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', parent, part, starts, ends);
        -- What the relay may do through the parent it may also do to one partition, attached or detached.
        FOR granted IN
            SELECT a.grantee::regrole AS role, a.privilege_type AS privilege, '' AS on_column
              FROM pg_class c, aclexplode(c.relacl) a
             WHERE c.oid = parent AND a.grantee NOT IN (0, c.relowner)
            UNION ALL
            SELECT a.grantee::regrole, a.privilege_type, format('(%I)', t.attname)
              FROM pg_attribute t, aclexplode(t.attacl) a
             WHERE t.attrelid = parent AND a.grantee <> 0 AND a.privilege_type = 'UPDATE'
        LOOP
            EXECUTE format('GRANT %s %s ON %s TO %s', granted.privilege, granted.on_column, part, granted.role);
        END LOOP;
        RETURN NEXT part;
        starts := ends;
    END LOOP;
END
$body$;

REVOKE ALL ON FUNCTION {ensure_partitions}(interval, interval) FROM PUBLIC;
--@end
