-- The wake-up of a sleeping relay (PROTOCOLS.md 9).

CREATE FUNCTION {wake}() RETURNS trigger LANGUAGE plpgsql AS
$body$
BEGIN
    PERFORM pg_catalog.pg_notify(TG_ARGV[0], '');
    RETURN NULL;
END
$body$;

-- K is free while anybody is awake: the shared lock is granted and nothing is sent, because a NOTIFY
-- serialises commits of the whole cluster. The doorman holds K exclusively only while all sleep.
-- BEFORE, not AFTER: the notification goes out at commit either way, K is held before a row exists, and nothing
-- is queued for the end of the statement. (Measurements were too noisy to tell the two apart.)
-- `database.notify = false` disables the trigger (relay migrate); it stays in place.
CREATE TRIGGER {wake_trigger} BEFORE INSERT ON {outbox} FOR EACH STATEMENT
    WHEN (NOT pg_catalog.pg_try_advisory_xact_lock_shared({lock_key}))
    EXECUTE FUNCTION {wake}({channel_name});
