"""The page: everything escaped, nothing fetched, every figure there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_profiles.limits import Limits
from ferrule_profiles.pick import pick
from ferrule_profiles.report import embedded_json, read_pick, render, write
from ferrule_profiles.run import BundleFacts, Run
from ferrule_runtime.errors import RecordError

MakeRun = Callable[..., Run]
MIB = 1 << 20
EVIL = '</script><script>alert(1)</script><img src="http://x.invalid/a.png" onerror="alert(2)">'


class Page(HTMLParser):
    """What a browser would make of the page: its elements, and their text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
            self.scripts.append("")
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th") and self.cells:
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data
            return
        self.text += data
        if self.cells and self.cells[-1]:
            self.cells[-1][-1] += f" {data.strip()}" if data.strip() else ""

    def elements(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def plots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.scripts[1])  # the style, then the plots
        return found

    def row(self, recipe: str) -> list[str]:
        return [cell.strip() for cell in next(row for row in self.cells if row[0].split()[0] == recipe)]


@pytest.fixture
def three(make_run: MakeRun) -> list[Run]:
    return [
        make_run("fp32", first=2.0, decode=5.0, peak=800 * MIB, size=500 * MIB, kl=0.0),
        make_run("w8", first=1.0, decode=15.0, peak=300 * MIB, size=150 * MIB, kl=0.005),
        make_run("w4g32", first=0.8, decode=20.0, peak=200 * MIB, size=90 * MIB, kl=None),
    ]


def test_every_figure_is_in_the_table(three: list[Run]) -> None:
    page = Page(render(three))
    row = page.row("w8")
    assert row[1:6] == ["150.0 MiB 157,286,400 B", "5.00", "0.00500", "90.0 % 88.0 to 92.0", "250 248 to 252"]
    assert row[6:8] == ["1.00 s 0.991 to 1.01", "15.0 14.9 to 15.1"]
    assert row[9].startswith("300.0 MiB 297.3")
    assert row[11] == "null not measured here"
    assert page.row("w4g32")[3] == "null --no-fidelity"
    assert [row[0].split()[0] for row in page.cells[1:]] == ["w4g32", "w8", "fp32"], "smallest first"


def test_choice_is_its_first_words_and_its_row_is_marked(three: list[Run]) -> None:
    choice = pick(three, "rpi5", Limits(max_kl=0.1))
    page = Page(render(three, choice.to_dict()))
    sentence = choice.sentence.replace("`", "")
    assert f"{sentence[0].upper()}{sentence[1:]}." in page.text
    for name, why in choice.lost:
        assert f"Not {name}:" in page.text
        assert why.replace("`", "") in page.text
    assert page.row("w8")[0] == "w8 picked"
    assert sum("picked" in row[0] for row in page.cells) == 1


def test_without_limits_nothing_is_said_to_be_picked(three: list[Run]) -> None:
    assert "nothing is picked" in Page(render(three)).text


def test_plots_hold_the_medians_and_intervals(three: list[Run]) -> None:
    time, memory, fidelity = Page(render(three, pick(three, "rpi5").to_dict())).plots()
    assert time["data"][0]["y"] == ["w4g32", "w8", "fp32"]
    totals = [a + b for a, b in zip(time["data"][0]["x"], time["data"][1]["x"], strict=True)]
    assert totals == pytest.approx([0.8 + 60 / 20, 1 + 60 / 15, 2 + 60 / 5])
    dots = memory["data"][0]
    assert (dots["x"], dots["y"]) == (pytest.approx([200, 300, 800]), pytest.approx([20, 15, 5]))
    assert dots["error_y"]["array"] == pytest.approx([0.18, 0.135, 0.045])
    assert dots["marker"]["color"] == ["$accent", "$ink", "$ink"]
    assert [label.strip() for label in fidelity["data"][0]["text"]] == ["w8", "fp32"], "who has no KL is left out"


def test_plots_without_figures_are_left_out(make_run: MakeRun) -> None:
    assert Page(render([make_run("w8", first=None, peak=None, kl=None)])).plots() == []


def test_page_asks_nothing_of_a_network(three: list[Run]) -> None:
    html = render(three)
    page = Page(html)
    for _, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "data", "poster"}
    assert "@import" not in html.partition("</style>")[0]
    assert "url(" not in html.partition("</style>")[0]
    policy = [meta.get("content") or "" for meta in page.elements("meta") if "http-equiv" in meta]
    assert policy
    assert policy[0].startswith("default-src 'none'")
    assert "http" not in policy[0]
    assert len(re.findall(r"\* plotly\.js v\d", html)) == 1


def test_page_is_made_for_phones_dark_rooms_and_paper(three: list[Run]) -> None:
    html = render(three)
    metas = {meta.get("name"): meta.get("content") for meta in Page(html).elements("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert 'class="scroll"' in html


def test_everything_that_comes_from_records_is_escaped(make_run: MakeRun) -> None:
    run = make_run(
        "w8", machine={"board": EVIL, "cpu": EVIL, "system": EVIL, "kernel": EVIL}, target=EVIL, board=EVIL,
        conditions={"celsius": {EVIL: 90.0}, "throttled": [EVIL]}, fidelity={"skipped": EVIL}, time=EVIL,
    )  # fmt: skip
    facts = {**vars(run.bundle), "recipe": EVIL, "name": EVIL, "checkpoint": EVIL, "engine_version": EVIL, "form": EVIL}
    run = make_run("w8", **{**vars(run), "bundle": BundleFacts(**facts)})
    clean = Page(render([make_run("w8")]))
    page = Page(render([run], pick([run], EVIL).to_dict()))
    assert len(page.scripts) == len(clean.scripts)
    assert page.elements("script") == clean.elements("script")
    assert not page.elements("img")
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert EVIL in page.text, "shown as text"
    label = page.plots()[0]["data"][0]["y"][0]
    assert "<" not in label, "Plotly would read tags in labels"
    assert "&lt;script&gt;" in label


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_embedded_json_is_the_value_and_cannot_end_its_element(value: Any) -> None:
    text = embedded_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


@given(st.text(max_size=40))
def test_any_name_of_a_recipe_keeps_the_page_whole(make_run: MakeRun, name: str) -> None:
    from ferrule_profiles.report import _code

    page = Page(str(_code(name)))
    assert {tag for tag, _ in page.tags} <= {"code"}
    assert page.text.replace("`", "") == name.replace("`", "")


def test_unlike_runs_get_sections_of_their_own_with_the_difference(make_run: MakeRun) -> None:
    runs = [make_run("w8"), make_run("w4g32", machine={"kernel": "6.1"}), make_run("w8", target="rpi4")]
    page = Page(render(runs))
    title, *headings = re.findall(r"tiny on (rpi\d)", page.text)
    assert (title, headings) == ("rpi4", ["rpi4", "rpi5", "rpi5"])
    differences = re.findall(r"kernel: (6\.\S+) against (6\.\S+)", page.text)
    assert [sorted(pair) for pair in differences] == [["6.1", "6.6.31"]]
    assert len(page.elements("table")) == 3
    assert len(page.plots()) == 9


def test_only_the_newest_run_of_a_recipe_is_shown(make_run: MakeRun) -> None:
    page = Page(render([make_run("w8", decode=5.0), make_run("w8", decode=10.0)]))
    assert page.row("w8")[7].startswith("10.0")
    assert len(page.cells) == 2
    assert "1 older run of the same recipes not shown" in page.text


def test_warnings_are_shown_with_whose_they_are(make_run: MakeRun) -> None:
    page = Page(render([make_run("w8"), make_run("w4g32", settings={"load_at_start": 3.9})]))
    assert "w4g32: load 3.90 on 4 cores at the start" in page.text


def test_stored_choice_is_read_and_one_of_other_runs_is_refused(tmp_path: Path, three: list[Run]) -> None:
    path = tmp_path / "pick.json"
    stored = {"schema_version": 1, "kind": "pick", **pick(three, "rpi5").to_dict()}
    path.write_text(json.dumps(stored))
    assert read_pick(path, three)["bundle"] == "tiny-w4g32"
    with pytest.raises(RecordError, match="chose `tiny-w4g32`, which is not among the runs"):
        read_pick(path, three[:2])
    for broken in ("{", "[]", '{"kind": "pick", "schema_version": 2}', '{"kind": "pick", "schema_version": 1}'):
        path.write_text(broken)
        with pytest.raises(RecordError):
            read_pick(path, three)


def test_no_runs_make_no_page() -> None:
    with pytest.raises(RecordError, match="there are no runs"):
        render([])


def test_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "report.html", "new")
    write(tmp_path / "report.html", "newer")
    assert [path.name for path in tmp_path.glob("*.html*")] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "newer"
    with pytest.raises(RecordError, match="cannot be written"):
        write(tmp_path / "none" / "report.html", "x")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(RecordError, match="cannot be written"):
        write(tmp_path / "folder.html", "x")
    assert not list(tmp_path.glob(".*.part"))
