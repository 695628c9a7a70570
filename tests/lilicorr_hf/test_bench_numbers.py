"""From rows of results to tables: numbers worked out by hand."""

import copy
import json

import numpy as np
import pytest
import torch

from lilicorr_hf.bench.cli import main
from lilicorr_hf.bench.compare import compare
from lilicorr_hf.bench.runner import counts_by_sequence, pool_counts
from lilicorr_hf.bench.statistics import median_interval, mismatches, overall, summarise, tau_interval, with_tiers
from lilicorr_hf.bench.tables import Table, tables
from lilicorr_hf.modeling.generation_lilicorr import BlockRecord
from lilicorr_hf.modeling.lattice_lilicorr import Lattice


def run(seconds, tokens=10, accepted=0, blocks=9, **fields):
    fields = {"identical": 1, "ties": 0, "gap": 0.0} | fields
    return {
        "seconds": seconds,
        "tokens": tokens,
        "passes": blocks + 1,
        "blocks": blocks,
        "accepted": accepted,
    } | fields


def row(item="d/1", dataset="d", category="a", turn=0, temperature=0.0, seed=None, batch=1, length=None, **systems):
    names = {"item": item, "dataset": dataset, "ids": [item], "category": category, "turn": turn}
    how = {"temperature": temperature, "seed": seed, "batch": batch, "length": length}
    return names | how | {"input_tokens": [5], "systems": {"plain": run(10)} | systems}


def made_of(rows):
    return tables(summarise(rows), overall(rows))


def test_tau_weighs_blocks_and_its_mean_weighs_prompts():
    rows = [row("d/1", lilicorr=run(5, accepted=6, blocks=2)), row("d/2", lilicorr=run(4, accepted=2, blocks=8))]
    plain, ours = summarise(rows)
    assert ours["tau"] == 1 + 8 / 10 and ours["tau_mean"] == (4 + 1.25) / 2
    assert (ours["speedup"], ours["tokens_per_second"]) == (2.25, 2.25)
    assert (plain["system"], plain["speedup"], plain["tau"]) == ("plain", 1, 1)
    assert ours["count"] == 2 and ours["passes"] == 12 and ours["identical"] == 2


def test_prompts_of_a_batch_are_prompts():
    """One batch of two prompts and one of one: tau and its interval are those of three prompts."""
    batch = run(5, accepted=8, blocks=10, by_sequence=[(6, 2), (2, 8)], identical=2)
    rows = [row("d/1+2", batch=2, lilicorr=batch), row("d/3", batch=2, lilicorr=run(5, accepted=3, blocks=3))]
    rows[0]["ids"] = ["d/1", "d/2"]
    ours = summarise(rows)[1]
    assert ours["tau"] == 1 + 11 / 13 and ours["tau_mean"] == pytest.approx((4 + 1.25 + 2) / 3)
    assert (ours["tau"], ours["tau_low"], ours["tau_high"]) == tau_interval([6, 2, 3], [2, 8, 3], "abc")


def test_a_sequence_that_ends_with_its_first_token_is_a_prompt_without_blocks():
    blocks = [BlockRecord(7, 3, 0.1, 0.2, sequence) for sequence in (0, 2, 2)]
    assert counts_by_sequence(blocks, 3) == [(3, 1), (0, 0), (6, 2)] and counts_by_sequence([], 3) == []
    one = row("d/1", batch=3, lilicorr=run(5, accepted=9, blocks=3, by_sequence=counts_by_sequence(blocks, 3)))
    one["ids"] = ["a", "b", "c"]
    assert summarise([one])[1]["tau"] == 4 and overall([one])[0]["tau_mean"] == 4


def test_intervals():
    assert median_interval([1.5] * 8, range(8)) == (1.5, 1.5, 1.5)
    assert tau_interval([4] * 5, [2] * 5, range(5)) == (3, 3, 3)
    assert np.isnan(tau_interval([0], [0], "a")).all()
    values = list(np.random.default_rng(1).normal(2, 0.5, 200))
    middle, low, high = median_interval(values, range(len(values)))
    # The standard error of a median of normal values is 1.25 sigma / sqrt(n); 95% are about two of them either way.
    assert low < middle < high and 2.5 < (high - low) / (1.25 * 0.5 / 200**0.5) < 5


def test_answers_to_one_prompt_are_drawn_together():
    """Other seeds and turns tell nothing of other prompts: the interval is that of the prompts."""
    seeds = [row(f"d/{i}", temperature=1.0, seed=seed, lilicorr=run(5 + i)) for seed in (1, 2, 3) for i in range(6)]
    turns = [row(f"d/{i}", turn=turn, lilicorr=run(5 + i)) for i in range(6) for turn in (0, 1)]
    once = [row(f"d/{i}", lilicorr=run(5 + i)) for i in range(6)]
    bounds = [
        [summary[name] for name in ("speedup", "speedup_low", "speedup_high")]
        for rows in (seeds, turns, once)
        for summary in summarise(rows)[1:]
    ]
    assert bounds[0] == bounds[1] == bounds[2]
    values, blocks, prompts = [3, 1, 4, 1, 5, 9], [2, 2, 3, 1, 2, 4], [*range(6)]
    thrice = tau_interval(values * 3, blocks * 3, prompts * 3)
    assert thrice == pytest.approx(tau_interval(values, blocks, prompts))
    faster = [[copy.deepcopy(row) for row in rows] for rows in (turns, once)]
    for rows in faster:
        for one in rows:
            one["systems"]["lilicorr"]["seconds"] -= 1 + int(one["item"][2:]) % 3
    changes = [compare({"rows": a}, {"rows": b}).lines[0][-1] for a, b in zip((turns, once), faster, strict=True)]
    assert changes[0] == changes[1] != ""


def test_stages_pool_and_seeds():
    fields = {"draft": 1.0, "verify": 2.0, "slots": 8, "covered": 6, "oracle": 5}
    rows = [
        row("d/1", temperature=1.0, seed=1, lilicorr=run(5, accepted=2, blocks=4, **fields)),
        row("d/1", temperature=1.0, seed=2, lilicorr=run(4, accepted=4, blocks=4, **fields)),
    ]
    ours = summarise(rows)[1]
    assert (ours["draft_ms"], ours["verify_ms"]) == (250, 500)
    assert (ours["draft_share"], ours["verify_share"]) == (2 / 9, 4 / 9)
    assert (ours["coverage"], ours["oracle_tau"]) == (0.75, 1 + 10 / 8)
    assert ours["tau_std"] == pytest.approx(0.5 / 2**0.5) and ours["speedup_std"] == pytest.approx(0.5 / 2**0.5)


def test_thirds_of_entropy_are_of_one_length():
    rows = [row(f"d/{i}", length=100 * (1 + i % 2)) | {"entropy": float(i)} for i in range(12)]
    tiers = {}
    for made in with_tiers(rows):
        tiers.setdefault((made["length"], made["tier"]), []).append(made["entropy"])
    assert tiers[100, "low"] == [0, 2] and tiers[100, "high"] == [8, 10] and tiers[200, "mixed"] == [5, 7]


def test_slots_whose_truth_is_among_the_candidates():
    """Blocks after tokens 0 and 2 of the answer; the last drafted nothing."""
    lattice = Lattice(candidate_ids=torch.tensor([[[1, 9], [2, 9], [8, 9]]]))
    other = Lattice(candidate_ids=torch.tensor([[[8, 9], [4, 9], [5, 9]]]))
    blocks = [
        BlockRecord(3, 1, 0, 0, lattice=lattice),
        BlockRecord(3, 0, 0, 0, lattice=other),
        BlockRecord(0, 0, 0, 0),
    ]
    assert pool_counts(blocks, [0, 1, 2, 3, 4, 5]) == {"slots": 6, "covered": 4, "oracle": 2}
    assert pool_counts([BlockRecord(3, 1, 0, 0)], [0, 1]) == {}


def test_mismatches_beyond_ties():
    rows = [row(lilicorr=run(5, identical=0, ties=1, gap=1e-6)), row(lilicorr=run(5, identical=0, ties=0, gap=0.5))]
    assert mismatches(rows[:1]) == [] and mismatches(rows) == ["d/1: lilicorr, gap 5.0e-01"]


def test_tables_name_only_what_varies():
    rows = [
        row(f"{name}/1", name, batch=batch, lilicorr=run(4, accepted=9), argmax=run(5, accepted=8))
        for name in ("code", "math")
        for batch in (4, 1)
    ]
    speed, acceptance, details, _ = made_of(rows)
    assert speed.columns == ["prompts", "batch", "plain", "lilicorr", "argmax"]
    assert [line[:2] for line in speed.lines] == [
        ["code", "1"],
        ["math", "1"],
        ["code", "4"],
        ["math", "4"],
        ["average", ""],
    ]
    assert speed.lines[0][2:] == ["1.0 tokens/s", "**2.50x**", "2.00x"]
    assert speed.lines[-1][2:] == ["1.0 tokens/s", "2.50x", "2.00x"]
    assert acceptance.lines[0][2:] == ["1.0", "**2.00 / 2.5 / 2.50x**", "1.89 / 2.0 / 2.00x"]
    assert details.wide and len(details.lines) == 8


def test_lines_go_from_short_to_long_and_from_low_to_high_entropy():
    rows = [
        row(f"d/{i}", length=length, lilicorr=run(5)) | {"entropy": float(entropy)}
        for length in (200, 100)
        for i, entropy in enumerate((5, 1, 3))
    ]
    lines = [line[:3] for line in made_of(rows)[0].lines[:-1]]
    assert lines == [["d", length, tier] for length in ("100", "200") for tier in ("low", "mixed", "high")]


def test_all_prompts_are_compared_pairwise():
    """Seconds of plain decoding are 10: twice, once and half as fast, on prompts of two datasets."""
    rows = [
        row("code/1", "code", lilicorr=run(5, accepted=9), argmax=run(10)),
        row("math/1", "math", lilicorr=run(10, accepted=0), argmax=run(10)),
        row("math/2", "math", lilicorr=run(20, accepted=0), argmax=run(16)),
    ]
    table = next(table for table in made_of(rows) if table.title == "All prompts, greedy")
    assert table.columns == ["batch", "system", "speed-up", "not slower", "lilicorr's speed over it", "tau"]
    ours, theirs = table.lines
    assert ours == ["1", "lilicorr", "1.00x (0.50–2.00)", "2/3", "–", "1.333"]
    assert theirs == ["1", "argmax", "1.00x (0.62–1.00)", "2/3", "1.00x (0.80–2.00)", "1.000"]


def test_variants_are_compared_with_what_they_vary():
    rows = [row(lilicorr=run(5, accepted=9), **{"lilicorr:walk=viterbi": run(5, accepted=0)})]
    table = next(table for table in made_of(rows) if "other rules" in table.title)
    assert table.lines == [["d", "2.000", "1.000 (-50.0%)"]]


def test_markdown():
    table = Table("Title", ["a", "b"], [["x", "**y**"]], "Note.")
    assert table.markdown() == "**Title.** Note.\n\n| a | b |\n| --- | --- |\n| x | **y** |\n"


def numbers(*rows):
    return {"provenance": {}, "summary": [], "rows": list(rows)}


def test_comparison_is_paired():
    """Prompts differ widely, the change is the same on each: it shows all the same."""
    first = [row(f"d/{i}", lilicorr=run(4 + i % 5, accepted=3 * i, blocks=9)) for i in range(1, 20)]
    second = [row(f"d/{i}", lilicorr=run((4 + i % 5) / 1.1, accepted=3 * i + 9, blocks=9)) for i in range(3, 25)]
    [line] = compare(numbers(*first), numbers(*second)).lines
    assert line[:3] == ["d", "lilicorr", "17"]
    a, b = (1 + sum(3 * i + more for i in range(3, 20)) / (9 * 17) for more in (0, 9))
    assert line[3:5] == [f"{a:.3f}", f"{b:.3f}"]
    assert line[5].startswith(f"{b / a - 1:+.1%} (") and line[5].endswith("*")
    assert line[8] == "+10.0% (+10.0% to +10.0%) *"


def test_comparison_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="in common"):
        compare(numbers(row("d/1", lilicorr=run(1))), numbers(row("d/2", lilicorr=run(1))))
    for name, content in (("a", numbers(row(lilicorr=run(1)))), ("b", {"x": 1})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="b.json is not what"):
        main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])


def test_comparing_a_run_with_itself(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(numbers(row("d/1", lilicorr=run(4)), row("d/2", lilicorr=run(5)))))
    main(["compare", str(path), str(path)])
    assert "+0.0%" in capsys.readouterr().out
