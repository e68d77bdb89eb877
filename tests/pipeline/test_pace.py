"""How wide guesses are, from what they brought."""

from __future__ import annotations

from aprefetch.pipeline.pace import LEAST, MOST, PROBE_EVERY, START, WINDOW_STEPS, Pace
from aprefetch.stats import Counters

MS = 1_000_000


def steps(
    pace: Pace, counters: Counters, n: int, *, busy: float, stall: float, ms: float = 10.0
) -> None:
    """`n` steps on a drive that is busy, and compute that stands still, for these shares."""
    for _ in range(n):
        counters.read_busy_ns += int(busy * ms * MS)
        counters.stall_ns += int(stall * ms * MS)
        counters.bytes_read += 1_000_000
        counters.misses_device += 4
        pace.end_step(int(ms * MS), n_issued=1)


def test_width_is_top_k_at_first_and_follows_what_comes_true() -> None:
    pace = Pace(Counters(), 4)
    pace.end_step(MS, 1)  # step 0 is a probe
    assert pace.width(3, 1, 12, 4) == 4
    for _ in range(200):
        pace.saw(3, 1, range(12), {0, 1, 4, 5, 6}, 4)
    assert pace.width(3, 1, 12, 4) == 2
    assert pace.width(2, 1, 12, 4) == 4  # each layer, each depth for itself
    for _ in range(200):
        pace.saw(3, 1, range(12), set(range(9)), 4)
    assert pace.width(3, 1, 12, 4) == 9


def test_a_busy_drive_stops_guesses_and_an_idle_one_widens_them() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    for _ in range(300):
        pace.saw(1, 1, range(12), {0, 1, 2} if _ % 3 else {0, 1, 3, 4, 5}, 4)
    width = pace.width(1, 1, 12, 4)
    steps(pace, counters, 20 * WINDOW_STEPS, busy=1.0, stall=0.5)
    assert pace.threshold == MOST
    assert pace.width(1, 1, 12, 4) <= 2 < width + 1
    steps(pace, counters, 40 * WINDOW_STEPS, busy=0.3, stall=0.3)
    assert pace.threshold < 0.2
    assert pace.width(1, 1, 12, 4) == 6


def test_guesses_are_no_wider_than_the_wait_they_save_is_worth() -> None:
    least = {}
    for ms in (0.5, 2.0, 10.0):  # 4 misses a step, in whose reads a third of it is spent waiting
        counters = Counters()
        pace = Pace(counters, 4)
        steps(pace, counters, 40 * WINDOW_STEPS, busy=0.3, stall=0.33, ms=ms)
        least[ms] = pace.threshold
    assert least[0.5] == START > least[2.0] > least[10.0] == LEAST


def test_windows_without_guesses_say_nothing_about_their_width() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    for _ in range(40):
        pace.is_asleep = True
        steps(pace, counters, WINDOW_STEPS, busy=0.3, stall=0.3)
    assert pace.threshold == START


def test_without_stalls_nothing_is_widened() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    steps(pace, counters, 10 * WINDOW_STEPS, busy=0.3, stall=0.0)
    assert pace.threshold == 0.5


def test_wrong_guesses_cease_but_for_probes_and_the_counter_says_so() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    for _ in range(300):
        pace.saw(1, 1, range(4), set(), 4)
    widths = []
    for _ in range(4 * PROBE_EVERY):
        widths.append(pace.width(1, 1, 4, 4))
        pace.end_step(MS, widths[-1])
    assert sum(w > 0 for w in widths) == 4
    assert counters.guesses_off == 4 * PROBE_EVERY - 4


def test_guesses_that_cost_more_than_they_bring_are_turned_off() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    n_asleep = 0
    for _ in range(60):
        n_asleep += pace.is_asleep
        steps(pace, counters, WINDOW_STEPS, busy=0.5, stall=0.3, ms=9.0 if pace.is_asleep else 10.0)
    assert n_asleep >= 45
    for _ in range(60):  # now they pay
        n_asleep -= pace.is_asleep
        steps(pace, counters, WINDOW_STEPS, busy=0.5, stall=0.3, ms=9.0 if pace.is_asleep else 5.0)
    assert n_asleep >= 20


def test_where_all_is_cached_no_router_is_asked() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    for _ in range(WINDOW_STEPS):
        pace.end_step(MS, 1)
    assert pace.is_asleep
    was_asleep = []
    for _ in range(4):  # misses again; one of these windows is a trial of doing without
        steps(pace, counters, WINDOW_STEPS, busy=0.5, stall=0.3)
        was_asleep.append(pace.is_asleep)
    assert was_asleep.count(True) == 1


def test_the_bytes_of_a_layer_are_those_the_drive_can_read_meanwhile() -> None:
    counters = Counters()
    pace = Pace(counters, 4)
    assert pace.bytes_per_layer is None
    steps(pace, counters, WINDOW_STEPS, busy=0.5, stall=0.3)
    # 1 MB in 5 ms of reading is 200 MB/s; a layer takes 2.5 ms
    assert pace.bytes_per_layer is not None and abs(pace.bytes_per_layer - 500_000) < 1000
