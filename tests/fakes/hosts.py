"""Hosts as generators: each does something and yields what it waits for. One thread runs them all, in an order that dice choose."""

import random
from collections.abc import Callable, Generator, Iterable

from fake_cuda import Deadlock, Machine

Host = Generator[Callable[[], bool], None, None]


def play(machine: Machine, hosts: Iterable[Host], *, seed: int = 0) -> None:
    """Until every host has ended and every stream is empty. Raises Deadlock as soon as nothing can get on."""
    rng = random.Random(seed)
    waiting: dict[int, tuple[Host, Callable[[], bool]]] = {index: (host, lambda: True) for index, host in enumerate(hosts)}
    while waiting:
        ready = [index for index, (_, condition) in waiting.items() if condition()]
        moved = machine.step() if not ready or rng.random() < 0.5 else False
        if not ready:
            if not moved:
                raise Deadlock(f"hosts {sorted(waiting)} wait for ever; {'; '.join(machine.stuck())}")
            continue
        index = rng.choice(ready)
        host, _ = waiting[index]
        try:
            waiting[index] = host, next(host)
        except StopIteration:
            del waiting[index]
    machine.run()
