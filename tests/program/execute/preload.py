"""Imported by the process that all ranks are forks of: the transformers are captured once."""

from tests.program.execute.jobs import gpt

for experts in (False, True):
    for stages in (2, 4):
        gpt(stages, experts, False).captured()
