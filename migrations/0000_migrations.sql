-- The record of what was applied. Everything lives in one schema, which may exist already.
--
-- How these files are read: docs/schema.md. Words in braces are quoted names (relay/database/names.py); a line
-- "--@if <option>" starts a part that only some databases get. A file that was released never changes.

--@if create_schema
CREATE SCHEMA {schema};
--@end

CREATE TABLE {migration} (
    version    int         NOT NULL,
    name       text        NOT NULL,
    checksum   text        NOT NULL,  -- SHA-256 of the file as it was shipped
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT {migration_pkey} PRIMARY KEY (version)
);
