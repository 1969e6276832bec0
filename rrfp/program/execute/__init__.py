"""Programs on real processes: one process per device, the engine's loop in each, collectives on streams beside it."""
