"""Trust in guesses falls with wrong ones, stops their issue, and comes back."""

from __future__ import annotations

from aprefetch.pipeline.guesses import PROBE_EVERY, GuessTrust, Verdict


def test_wrong_guesses_lose_rights_and_right_ones_win_them_back() -> None:
    trust = GuessTrust()
    assert trust.verdict() is Verdict.DISPLACES
    seen = []
    for _ in range(60):
        trust.resolved(False)
        seen.append(trust.verdict())
    ranks = [verdict.value for verdict in seen if verdict is not Verdict.DISPLACES]
    assert ranks == sorted(ranks, reverse=True) and ranks[-1] == 0
    later = [trust.verdict() for _ in range(10 * PROBE_EVERY)]
    assert later.count(Verdict.DISPLACES) == 10  # probes
    assert later.count(Verdict.REFUSED) == 10 * (PROBE_EVERY - 1)
    n_probes = 0
    while not trust.may_displace():  # every probe comes true
        trust.resolved(True)
        n_probes += 1
    assert n_probes < 16 and trust.verdict() is Verdict.DISPLACES
