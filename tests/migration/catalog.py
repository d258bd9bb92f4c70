"""What a schema is made of, as comparable text: everything that a migration can change, without oids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.outbox import Outbox

_QUERIES: Final = {
    "relations": """
        SELECT c.relname, c.relkind, c.relpersistence, c.reloptions, pg_get_expr(c.relpartbound, c.oid), c.relreplident
          FROM pg_class c WHERE c.relnamespace = {namespace} ORDER BY 1
    """,
    "columns": """
        SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
               a.attgenerated, a.attstorage, a.attcollation::regcollation::text, pg_get_expr(d.adbin, d.adrelid)
          FROM pg_attribute a
          JOIN pg_class c ON c.oid = a.attrelid
          LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE c.relnamespace = {namespace} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 2
    """,
    "indexes": """
        SELECT pg_get_indexdef(i.indexrelid), i.indisvalid
          FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid WHERE c.relnamespace = {namespace} ORDER BY 1
    """,
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid), convalidated
          FROM pg_constraint WHERE connamespace = {namespace} ORDER BY 1, 2
    """,
    "sequences": """
        SELECT c.relname, s.seqtypid::regtype::text, s.seqstart, s.seqincrement, s.seqmax, s.seqmin, s.seqcache, s.seqcycle
          FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid WHERE c.relnamespace = {namespace} ORDER BY 1
    """,
    "functions": """
        SELECT pg_get_functiondef(p.oid), p.proacl::text FROM pg_proc p
         WHERE p.pronamespace = {namespace} ORDER BY 1
    """,
    "triggers": """
        SELECT c.relname, pg_get_triggerdef(t.oid), t.tgenabled
          FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
         WHERE c.relnamespace = {namespace} AND NOT t.tgisinternal ORDER BY 1, 2
    """,
}


def dump(outbox: Outbox) -> dict[str, list[tuple[Any, ...]]]:
    """The objects in the schema of the outbox, by kind."""
    namespace = "(SELECT oid FROM pg_namespace WHERE nspname = {schema_name})"
    return {kind: outbox.execute(query.replace("{namespace}", namespace)) for kind, query in _QUERIES.items()}
