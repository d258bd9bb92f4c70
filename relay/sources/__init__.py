"""Where events come from. Each source fulfils `relay.source`."""
