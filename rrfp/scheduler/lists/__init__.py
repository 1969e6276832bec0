"""Schedules as lists, one row per rank: our generators, the names of published ones, and torch's CSV notation. No torch in here."""

from rrfp.scheduler.lists.file import ListFile, read, read_file, text_of, token, write
from rrfp.scheduler.lists.names import PUBLISHED, Published
from rrfp.scheduler.lists.ours import LISTS, generate, interleaved, interleaved_forwards, one_f_one_b, zero_bubble
from rrfp.scheduler.lists.rows import actions_of, as_row, every_action, in_microbatch_order, whole_backwards, without_idle

__all__ = [
    "LISTS", "PUBLISHED", "ListFile", "Published", "actions_of", "as_row", "every_action", "generate", "in_microbatch_order", "interleaved",
    "interleaved_forwards", "one_f_one_b", "read", "read_file", "text_of", "token", "whole_backwards", "without_idle", "write", "zero_bubble",
]
