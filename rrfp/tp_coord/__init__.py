"""Which ranks must run the same sequence of actions, and how they agree on it. Does not know what a schedule is."""
