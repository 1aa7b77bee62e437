"""Interleaved timing: every job once per round, medians, samples that other processes disturbed taken again."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PAUSE_SECONDS = 0.004
"""Waited before each sample: OpenMP workers of the job before spin for a while and would take a core from this one."""

ATTEMPTS = 4
"""How often one sample is taken again when something else used the CPU meanwhile."""


@dataclass
class Job:
    """One thing to time. `samples` is how many are wanted, `times` (seconds) what was measured."""

    name: str
    direction: str
    call: Callable[[], object]
    samples: int = 1
    times: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.times)


@dataclass
class Clock:
    """Takes samples and watches the rest of the machine (Linux; elsewhere it only takes samples).

    `patience` bounds the seconds spent on repeating disturbed samples: past it every sample counts, and
    `given_up` says so.
    """

    patience: float = 120.0
    repeated: int = 0
    spent: float = 0.0

    @property
    def given_up(self) -> bool:
        return self.spent > self.patience

    def sample(self, call: Callable[[], object]) -> float:
        """Seconds one call took; the fastest attempt when all were disturbed."""
        attempts = []
        for _ in range(ATTEMPTS):
            time.sleep(PAUSE_SECONDS)
            before = _seconds_of_others()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            attempts.append(seconds)
            # /proc counts in ticks of 10 ms, hence the absolute part.
            if self.given_up or _seconds_of_others() - before <= 0.04 + 0.05 * seconds:
                return seconds
            self.repeated += 1
            self.spent += seconds + 0.3
            time.sleep(0.3)
        return min(attempts)


def _seconds_of_others() -> float:
    """CPU seconds used on this machine by anything but this process (steal included); 0 where unknown."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    ours = os.times()
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - ours.user - ours.system


def wanted_samples(seconds: float, *, budget: float, most: int, least: int) -> int:
    """As many samples as fit `budget` seconds, from `least` to `most`; one for calls over five seconds."""
    if seconds > 5:
        return 1
    return max(least, min(most, math.ceil(budget / max(seconds, 1e-9))))


def run_interleaved(jobs: list[Job], clock: Clock) -> None:
    """A B C A B C ..., so that a slow minute of the machine falls on all of them.

    A job that wants fewer samples than the others is spread evenly over the rounds.
    """
    rounds = max(job.samples for job in jobs)
    for r in range(rounds):
        for job in jobs:
            if (r + 1) * job.samples // rounds > r * job.samples // rounds:
                job.times.append(clock.sample(job.call))
