"""Work that keeps the tables healthy, beside the flow of events."""
