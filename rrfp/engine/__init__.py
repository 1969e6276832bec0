"""One loop per rank: take arrivals, choose, agree, run, send. Knows protocols, not implementations."""
