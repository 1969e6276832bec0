"""Why a run took as long as it did: what every action waited for, the critical path, findings, and what to change."""
