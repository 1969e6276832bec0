"""Strategies as programs: a forward graph with tags, directives over its training DAG, plans and hint orders for the engine."""
