"""How far and how wide to guess, from what guessing brought so far.

Each rank of each prediction (layer, depth, first guess, second guess, ...) has a running share of
times it came true. A guess is worth issuing while that share is above a threshold, and the
threshold follows the drive: where reads leave it idle while compute waits, it falls, and guesses
get wider and deeper, but not below the share at which right ones save more of the wait than wrong
ones take of the loop; where the drive is busy all the time, a wrong guess takes the place of a byte
that is needed, and the threshold rises until guesses cease. From time to time a few are let through
all the same, to see whether things have changed.

Guessing costs compute, too. So the time of decoding steps is compared between windows of some steps
with guesses and windows without, and the slower way is only tried again now and then.

The pace owns these estimates. It also caps the bytes of one layer's guesses by what the drive can
read until their turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprefetch.stats import Counters

__all__ = ["Pace"]

WINDOW_STEPS = 8  # steps between two looks at the drive
PROBE_EVERY = 16  # steps between two looks at guesses that are not worth it
WEIGHT = 1 / 32  # of the newest outcome
FIRST, LATER = 0.7, 0.3  # shares assumed at first, for ranks below and from top-k
LEAST, START, MOST = 0.15, 0.5, 0.95  # of the threshold
BUSY, IDLE = 0.90, 0.82  # shares of the time that the drive reads
NO_STALL = 0.02  # of the time: nothing to gain
WRONG_NS = 100_000  # of the loop's and its threads' time, for a guess that was read in vain
FIRST_TRIAL, TRIAL_EVERY = 2, 12  # windows before a trial of the way that was slower
PAYS = 0.97  # the other way must take less than this of the time


class Pace:
    """One per lookahead; belongs to the loop's thread, but for reading.

    Args:
        counters: read here; `guesses_off` is written.
        n_layers: layers that are called in a step.
    """

    def __init__(self, counters: Counters, n_layers: int) -> None:
        self.threshold = START
        self.is_asleep = False
        self.bytes_per_layer: float | None = None
        self._counters = counters
        self._n_layers = max(1, n_layers)
        self._shares: dict[tuple[int, int], list[float]] = {}  # (layer, depth) -> by rank
        self._n_seen: dict[tuple[int, int], int] = {}
        self._step = 0
        self._wall_ns = 0
        self._decode_ns: list[int] = []  # of the window's single-row steps
        self._is_without = False  # the way that was faster
        self._is_trial = False  # this window goes the other way
        self._trial_ns: float | None = None  # a step of the trial, until the window after it
        self._base_ns = 0.0  # a step of the window before the trial
        self._n_windows = 0  # since the last trial
        self._next_trial = FIRST_TRIAL
        self._before = self._look()

    def _look(self) -> tuple[int, int, int, int]:
        c = self._counters
        return c.stall_ns, c.read_busy_ns, c.bytes_read, c.misses_device

    def shares(self, layer: int, depth: int, n_ranks: int, top_k: int) -> list[float]:
        """Running shares of guesses that came true, by rank; at least `n_ranks` of them."""
        found = self._shares.setdefault((layer, depth), [])
        while len(found) < n_ranks:
            found.append(FIRST if len(found) < top_k else LATER)
        return found

    @property
    def is_probing(self) -> bool:
        """Whether this step's guesses are let through however unlikely they are."""
        return self._step % PROBE_EVERY == 0

    def width(self, layer: int, depth: int, n_ranks: int, top_k: int) -> int:
        """How many of the likeliest `n_ranks` guesses to issue."""
        shares = self.shares(layer, depth, n_ranks, top_k)
        n = 0
        while n < n_ranks and shares[n] >= self.threshold:
            n += 1
        if not n and depth == 1 and self.is_probing:
            return min(top_k, n_ranks)
        return n

    def saw(
        self, layer: int, depth: int, named: Sequence[int], picked: set[int], top_k: int
    ) -> None:
        """The router of `layer` has picked; `named` were its guesses, the likeliest first."""
        shares = self.shares(layer, depth, len(named), top_k)
        n = self._n_seen[layer, depth] = self._n_seen.get((layer, depth), 0) + 1
        weight = max(WEIGHT, 1 / (n + 3))  # what was assumed at first counts as three
        for rank, expert in enumerate(named):
            shares[rank] += ((expert in picked) - shares[rank]) * weight

    def end_step(self, wall_ns: int, n_issued: int, n_rows: int = 1) -> None:
        """A step over `n_rows` took `wall_ns` and named `n_issued` experts."""
        self._step += 1
        self._wall_ns += wall_ns
        if n_rows == 1:
            self._decode_ns.append(wall_ns)
        if not n_issued:
            self._counters.guesses_off += 1
        if self._step % WINDOW_STEPS:
            return
        now = self._look()
        stall_ns, busy_ns, n_bytes, n_misses = (
            a - b for a, b in zip(now, self._before, strict=True)
        )
        wall_ns, self._before, self._wall_ns = max(1, self._wall_ns), now, 0
        had_guesses = not self.is_asleep
        self.is_asleep = self._goes_without() or not n_misses
        if busy_ns:
            layer_ns = wall_ns / (WINDOW_STEPS * self._n_layers)
            self.bytes_per_layer = n_bytes / busy_ns * layer_ns
        if busy_ns > BUSY * wall_ns:
            self.threshold = min(MOST, self.threshold + 0.15)
        elif had_guesses and busy_ns < IDLE * wall_ns and stall_ns > NO_STALL * wall_ns:
            saved_ns = stall_ns / max(1, n_misses)
            least = min(START, max(LEAST, WRONG_NS / (WRONG_NS + saved_ns)))
            self.threshold = max(least, self.threshold - 0.05)

    def _goes_without(self) -> bool:
        """Whether the next window should do without guesses: it is faster, or to be tried.

        A trial is one window of the other way between two of the present one: as caches fill,
        steps get faster in any way, and the mean of the two allows for that.
        """
        if len(self._decode_ns) < WINDOW_STEPS:  # prefill in between
            self._decode_ns.clear()
            return self._is_without != self._is_trial
        # The median: one step that was held up by something else proves nothing.
        took = float(sorted(self._decode_ns)[WINDOW_STEPS // 2])
        self._decode_ns.clear()
        if self._is_trial:
            self._is_trial = False
            self._trial_ns = took
        elif self._trial_ns is not None:
            if self._trial_ns < PAYS * (self._base_ns + took) / 2:
                self._is_without = not self._is_without
            self._trial_ns = None
            self._n_windows = 0
        else:
            self._n_windows += 1
            self._is_trial = self._n_windows >= self._next_trial
            if self._is_trial:
                self._next_trial = TRIAL_EVERY
        if self._trial_ns is None:
            self._base_ns = took
        return self._is_without != self._is_trial
