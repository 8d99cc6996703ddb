"""What is shown of numbers and tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest

from twell.analysis.figures.labels import in_table
from twell.app.ui.formatting import (
    aligned,
    dead_limit,
    decimals,
    fixed,
    matching,
    message_markdown,
    number,
    pass_spread,
    percent,
    plot_label,
    plural,
    rare,
    running,
    seconds_ago,
    signed,
    times,
    token_html,
    typeset,
    visible,
    whole,
    with_intervals,
)
from twell.workbench.run.store import Run

THIN = "\u202f"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (" the", "␣the"),
        ("a\n\tb", "a⏎⇥b"),
        ("\u202eabc", "⟨U+202E⟩abc"),
        ("\u200d", "⟨U+200D⟩"),
        ("\u00a0", "⟨U+00A0⟩"),
        ("\u0301", "◌\u0301"),
        ("", "⟨empty⟩"),
        ("<script>", "<script>"),
        ("日本", "日本"),
    ],
)
def test_every_character_of_a_token_is_seen(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_running_text_keeps_its_spaces_and_stays_in_one_line() -> None:
    assert running("a b\nc\u2066d") == "a b⏎c⟨U+2066⟩d"


def test_tokens_are_escaped_for_html_and_for_plotly() -> None:
    assert "<script>" not in token_html("<script>")
    assert "&lt;script&gt;" in token_html("<script>")
    assert plot_label("</b>&") == "&lt;/b&gt;&amp;"
    assert plot_label("x" * 50, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012345, "0.0123"),
        (7.4512, "7.45"),
        (53.0, "53.0"),
        (1048576, f"1{THIN}048{THIN}576"),
        (0, "0"),
        (-2.5, "−2.50"),
        (0.00000105, f"1.05{THIN}×{THIN}10⁻⁶"),
        (-0.0001, "−0.000100"),
        (9.996, "10.0"),
        (0.0009996, "0.00100"),
        (9.996e-7, f"1.00{THIN}×{THIN}10⁻⁶"),
        (9.996e-5, "0.000100"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_to_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.9912, "99.12"),
        (0.99998, "99.998"),
        (1 - 3e-6, "99.9997"),
        (1 - 1e-16, "100"),
        (0.5, "50"),
        (0.043, "4.3"),
        (0.0004, "0.040"),
        (8e-7, "0.00008"),
        (1.0, "100"),
        (0.0, "0"),
        (-0.043, "−4.3"),
    ],
)
def test_percentages_keep_the_digits_that_tell_them_from_100(share: float, text: str) -> None:
    assert percent(share) == f"{text}{THIN}%"


def test_small_words() -> None:
    assert [rare(share) for share in (3 / 23, 0.01, 0.000113)] == [f"13{THIN}%", f"1.0{THIN}%", "113 per million"]
    assert plural(1, "token") == "1 token"
    assert plural(2000, "token") == f"2{THIN}000 tokens"
    assert signed(1.5) == "+1.50"
    assert signed(-1.5) == "−1.50"
    assert whole(12.6) == "13"
    assert [fixed(value) for value in (-0.4, -0.001, math.nan)] == ["−0.40", "0.00", "–"]
    ages = {59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 86399: "23 h", 86400: "1 day", 200_000: "2 days"}
    assert [seconds_ago(seconds) for seconds in ages] == [f"{age} ago" for age in ages.values()]


def test_clauses_about_intervals_say_where_there_are_none() -> None:
    assert with_intervals(pd.Series([math.nan, 0.5]), ", by document") == "with 95 % intervals, by document"
    assert with_intervals(pd.Series([math.nan, math.nan]), ", by document").startswith("without intervals")
    assert pass_spread(1.234, 1.3, 3) == f"{times(1.234)} to {times(1.3)} with 95{THIN}% confidence, 3 batches"
    assert pass_spread(math.nan, math.nan, 1).startswith("1 batch, too few for an interval")


def test_a_message_is_shown_as_it_is_but_for_its_code() -> None:
    assert message_markdown("got *a*, 2,048 rows: `twell run/*` at `x`") == (
        f"got \\*a\\*, 2{THIN}048 rows\\: `twell run/*` at `x`"
    )


def test_the_numbers_of_a_column_share_their_decimals() -> None:
    assert aligned([12.07, -0.314, 0.0]) == ["+12.1", "−0.3", "+0.0"]
    assert aligned([0.0502, -0.00041]) == ["+0.0502", "−0.0004"]
    assert aligned([9.97, 0.5], 2) == ["+10", "+0"]
    assert aligned([]) == []
    assert decimals([0.0, 0.0021, 0.134, 1.12, math.nan]) == 3
    assert decimals([1500.0, 22.0, 310.0]) == 0
    assert decimals([9.96], 2) == 0
    assert decimals([]) == 2


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ("z -0.27 (-0.3 to 26,452)", f"z −0.27 (−0.3 to 26{THIN}452)"),
        ("1,212,907 tokens, 95 %", f"1{THIN}212{THIN}907 tokens, 95{THIN}%"),
        ("1,212,907, and 26,452, of 12,3456", f"1{THIN}212{THIN}907, and 26{THIN}452, of 12,3456"),
        ("46.8 ms, 3 µs, 8 msec", f"46.8{THIN}ms, 3{THIN}µs, 8 msec"),
        ("2026-11-22, part-00000, --compression 4,8,16", "2026-11-22, part-00000, --compression 4,8,16"),
        ("p = 9.9e-05, -1e+12, lr-1e-05", f"p = 9.9{THIN}×{THIN}10⁻⁵, −1{THIN}×{THIN}10¹², lr-1e-05"),
        ("of 2048,5632 and 100,2048 in 3,5", "of 2048,5632 and 100,2048 in 3,5"),
    ],
)
def test_sentences_get_the_signs_and_spaces_of_the_other_numbers(plain: str, text: str) -> None:
    assert typeset(plain) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(67_654.3, "67654"), (-9999.6, "-10000"), (9999.4, "9999"), (0.123456, "0.1235"), (8e-7, "8e-07")],
)
def test_exported_tables_show_large_numbers_in_full(value: float, text: str) -> None:
    assert in_table(value) == text


def test_a_search_finds_what_is_shown_whatever_the_alphabet() -> None:
    texts = [" the", "THE", "Ünï", "\u0301a", "a\u202eb", "日本", "x\u00a0y"]
    frame = pd.DataFrame({"text": pd.array(texts, "string[pyarrow]")})
    wanted = {
        " t": [" the"],
        "the": [" the", "THE"],
        "ÜN": ["Ünï"],
        "◌": texts,
        "+202e": ["a\u202eb"],
        "本": ["日本"],
    }
    assert {search: matching(frame, "text", search)["text"].tolist() for search in wanted} == wanted


def test_few_sequences_do_not_bound_how_often_a_dead_neuron_fires(made_run: Run) -> None:
    few = replace(made_run.manifest, sequences=3)
    assert dead_limit(made_run, 500).startswith(f"in less than {percent(3 / made_run.manifest.sequences)} of such seq")
    assert "%" not in dead_limit(replace(made_run, manifest=few), 500), "3 / 3 would be 100 % of them"
