"""Messages between stages. Knows edges, credits and bytes; does not know what a schedule is."""
