"""Studies of the lookahead: states are noted from real runs, and shares are counted right."""

from __future__ import annotations

import fit_lookahead
import lookahead_study
import pytest
from lookahead_study import Seen, Tally, study


async def test_fitting_notes_every_routed_layer() -> None:
    noted, top_k = await fit_lookahead.collect(None, ["Once upon a time"], 5)
    assert sorted(noted) == [2, 3, 4, 5, 6, 7] and top_k == 4
    n_rows = {len(values) for rows in noted.values() for values in rows.values()}
    assert n_rows == {4}  # the answer's, but for the last token, which no step takes in
    assert noted[2]["truth"].shape == noted[2]["early"].shape


async def test_all_sources_are_asked_and_know_more_than_chance() -> None:
    watching, trace = await lookahead_study.collect(None, ["Once upon a time"], 12)
    rows, miss_rate = study(watching.seen, watching.n_experts, watching.top_k, 0.2, 2)
    assert 0 < miss_rate < 1
    found = {(row["source"], row["depth"], row["width"]): row for row in rows}
    for source in ("present", "shared", "drift", "late", "union"):
        assert found[source, 1, 1.0]["recall"] > 2 * watching.top_k / watching.n_experts
        recalls = [found[source, 1, width]["recall"] for width in lookahead_study.WIDTHS]
        assert recalls == sorted(recalls)
        assert ((source, 3, 3.0) in found) == (source != "late")
    assert found["union", 1, 1.0]["recall"] >= found["late", 1, 1.0]["recall"]
    assert found["late", 1, 1.0]["recall"] > found["drift", 1, 1.0]["recall"]
    leads = lookahead_study.leads_us(trace)
    assert 0 < leads["late"] < leads["1"] < leads["2"] < leads["3"] < leads["history"]


def test_shares_by_hand() -> None:
    tally = Tally()
    # Named 1, 2, 3; 1 was picked and cached, 2 was picked and missed, 3 neither picked nor cached.
    tally.add({1, 2, 3}, {1, 2, 5}, {2, 5}, {1, 7})
    assert tally.row() == pytest.approx(
        {"recall": 2 / 3, "recall_misses": 1 / 2, "precision": 2 / 3, "wasted": 1 / 2, "named": 3}
    )


def test_a_perfect_source_foretells_every_miss() -> None:
    seen = [
        Seen(layer, 1, picked, {("present", 1): picked, ("history", 0): picked})
        for picked in ([0, 1], [2, 3], [0, 3], [1, 2])
        for layer in (0, 1)
    ]
    rows, miss_rate = study(seen, n_experts=4, top_k=2, share=0.5, warm_up=1)
    exact = [row for row in rows if row["source"] == "present" and row["width"] == 1.0]
    assert exact and miss_rate > 0
    for row in exact:
        assert row["recall"] == row["recall_misses"] == row["precision"] == 1
        assert row["wasted"] == 0
