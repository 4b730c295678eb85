"""Figures follow the theme, name their units, and are the same bytes each time."""

import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minitrain import show, trace, viz
from minitrain.display import Source, Table, bytes_text
from minitrain.viz.figure import LOOKS, PALETTE
from minitrain.viz.time import _moments
from minitrain.viz.timelines import _begins, _busy, _lanes

KIB = 1024


def message(op, start, end, peer=None, waited=None):
    return SimpleNamespace(
        op=op,
        start_seconds=start,
        end_seconds=end,
        waited_seconds=end - start if waited is None else waited,
        peer=peer,
        group=(0, 1),
    )


def traces():
    memory = [(0.0, "parameters", 4 * KIB), (0.1, "activations", 8 * KIB)]
    memory += [(0.2, "gradients", 4 * KIB), (0.3, "activations", -8 * KIB)]
    sends = [message("send", 0.1, 0.2, 1), message("all_reduce", 0.3, 0.5)]
    receives = [message("recv", 0.1, 0.2, 0), message("all_reduce", 0.3, 0.5)]
    return [
        SimpleNamespace(
            rank=rank, origin_seconds=1e9, seconds=0.6, messages=messages, memory=memory
        )
        for rank, messages in enumerate((sends, receives))
    ]


def simulated():
    """A rank whose message begins to move while it computes."""
    t = traces()[0]
    t.label, t.origin_seconds, t.begins = "every rank", 0.0, [0.15, 0.4]
    return [t]


FIGURES = {
    "skyline": lambda: viz.skyline(traces()[0], {"formula": 16 * KIB}),
    "timeline": lambda: viz.timeline(traces()),
    "twin": lambda: viz.twin(traces(), simulated()),
    "bars": lambda: viz.bars(
        {"plain": {"parameters": KIB, "scratch": 5}}, 2 * KIB, "H100"
    ),
    "traffic": lambda: viz.traffic([[0, KIB], [2 * KIB, 0]]),
    "ledger": lambda: viz.ledger(
        [viz.Entry("one", 9 * KIB, None), viz.Entry("two", 4 * KIB, 2.5)], 8 * KIB
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_one_svg_with_two_palettes(name):
    figure = FIGURES[name]()
    root = ET.fromstring(figure.svg)
    assert root.tag.endswith("svg")
    assert root.get("role") == "img"
    assert root.get("aria-label") == figure.alt
    assert "prefers-color-scheme:dark" in figure.svg
    body = figure.svg[figure.svg.index("</style>") :]
    colours = set(re.findall(r"#[0-9a-f]{6}\b", body))
    assert not colours, f"{colours} do not follow the theme"
    assert "var(--paper)" in body
    assert "var(--ink)" in body


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_same_bytes_each_time_and_no_date(name):
    first, second = FIGURES[name](), FIGURES[name]()
    assert first.svg == second.svg
    assert not re.search(r"20\d\d-\d\d|Matplotlib v", first.svg)
    bundle = first._repr_mimebundle_()
    assert bundle == {"image/svg+xml": first.svg, "text/plain": repr(first)}
    assert "0x" not in bundle["text/plain"]


def texts(figure):
    return [t.strip() for t in re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", figure.svg)]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("skyline", ["live memory (KiB)", "peak 16.0 KiB", "formula 16.0 KiB"]),
        ("timeline", ["time (ms)", "rank 1", "all_reduce", "send", "computing"]),
        (
            "twin",
            ["rank 1", "measured", "simulated", "every rank", "not all are ready"],
        ),
        ("bars", ["memory (KiB)", "1,029 B", "H100 2,048 B", "scratch"]),
        ("traffic", ["from rank", "to rank", "1,024"]),
        ("ledger", ["memory a GPU (KiB)", "time a step (s)", "does not fit", "2.5 s"]),
    ],
)
def test_a_figure_names_units_and_values(name, labels):
    written = texts(FIGURES[name]())
    for label in labels:
        assert label in written


def test_kinds_differ_without_colour():
    looks = [LOOKS[kind] for kind in list(LOOKS)[:6]]
    plain = [colour for colour, hatch in looks if not hatch]
    assert len({hatch for _, hatch in looks if hatch}) == 4
    for palette in ("light", "dark"):  # the unhatched ones differ in lightness
        grey = [lightness(getattr(PALETTE[colour], palette)) for colour in plain]
        assert abs(grey[0] - grey[1]) > 0.15


def lightness(colour):
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_a_skyline_of_many_steps_keeps_its_peak():
    changes = [(i, "activations", 1 if i < 700 else -1) for i in range(1, 1400)]
    moments = _moments(changes, 50)
    assert len(moments) <= 53
    assert max(live["activations"] for _, live in moments) == 699
    assert moments[0] == (0, {"activations": 0}) or moments[0][1]["activations"] > 0


def test_what_was_there_before_stands_at_the_left_edge():
    moments = _moments([(0.0, "parameters", 5), (0.0, "other", 2)], 600)
    assert moments[0] == (0, {"parameters": 5, "other": 2})


def test_a_skyline_of_a_real_step_is_stable():
    torch.manual_seed(0)
    svgs = set()
    for _ in range(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        with trace() as t:
            model(torch.ones(4, 8)).sum().backward()
        svgs.add(t.skyline(t.peak_total_bytes).svg)
    assert len(svgs) == 1


def test_computing_excludes_what_was_waited_for():
    t = traces()[0]
    t.messages = [
        message("send", 0.1, 0.2),
        message("all_reduce", 0.15, 0.5, None, 0.1),
    ]
    assert _busy(t) == [(0.0, 0.1), (0.2, 0.4), (0.5, 0.6)]
    assert [lane for _, lane, _ in _lanes(t.messages)] == [0, 1]


def test_a_trace_of_nothing_is_drawn():
    with trace() as t:
        pass
    assert "peak 0 B" in texts(t.skyline())
    assert "rank 0" in texts(viz.timeline([t]))


def test_a_message_moves_when_all_its_ranks_have_called():
    first, second = traces()
    assert _begins([first, second], 1e9) == [[0.1, 0.3]] * 2
    second.origin_seconds += 0.05  # it runs later by so much
    late = _begins([first, second], 1e9)
    assert late[0] == pytest.approx([0.15, 0.35])
    assert late[1] == pytest.approx([0.1, 0.3]), "on its own clock"
    assert _begins([first], 1e9) == [[0.1, 0.3]], "nothing is known of the others"


def test_a_box_is_pale_until_its_message_moves():
    pale, solid = traces(), traces()
    pale[1].origin_seconds += 0.1
    assert "not all are ready" in texts(viz.timeline(pale))
    assert "not all are ready" not in texts(viz.timeline(solid))


def test_traffic_refuses_what_is_not_square():
    with pytest.raises(ValueError, match=r"2 rows have \[1, 2\] columns"):
        viz.traffic([[0, 1], [1]])


# Source and tables


def documented(x):
    """Doubles.

    At length.
    """
    return 2 * x


class Empty:
    """Only words."""


def test_show_displays_the_source_as_it_is():
    bundle = show(documented)._repr_mimebundle_()
    assert bundle["text/plain"].startswith('def documented(x):\n    """Doubles.')
    assert bundle["text/markdown"] == f"```python\n{bundle['text/plain']}\n```\n"


def test_show_without_docstrings_is_still_python():
    assert (
        show(documented, docstring=False).text == "def documented(x):\n    return 2 * x"
    )
    assert show(Empty, docstring=False).text == "class Empty:\n    ..."
    listing = show(Table.__post_init__, Source.__repr__, docstring=False).text
    assert listing.startswith("# minitrain/display.py\n\ndef __post_init__(self)")
    assert listing.count("# minitrain/display.py") == 1
    both = show(documented, Empty).text
    assert both.count("\n\n\n") == 1


def test_show_refuses_what_has_no_source():
    with pytest.raises(TypeError, match="no Python source"):
        show(len)
    with pytest.raises(TypeError, match="no Python source"):
        show(3)


def test_tables_align_numbers_right_and_escape_bars():
    table = Table(["op", "bytes"], [["a|b", "12 B"], ["all", "3 B"]])
    assert table.text.splitlines() == ["op   bytes", "a|b   12 B", "all    3 B"]
    assert table.markdown.splitlines()[1:3] == ["| :--- | ---: |", r"| a\|b | 12 B |"]
    with pytest.raises(ValueError, match="3 cells in a table of 2 columns"):
        Table(["a", "b"], [["1", "2", "3"]])


def test_a_column_of_signed_numbers_is_aligned_right():
    rows = [["+2.5 %", "-1", "-"], ["-13.0 %", "10", "a"], ["", "+3", "+b"]]
    table = Table(["error", "count", "name"], rows)
    assert table.markdown.splitlines()[1] == "| ---: | ---: | :--- |"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (10239, "10,239 B"),
        (10240, "10.0 KiB"),
        (3 * 1024**2, "3.00 MiB"),
        (80 * 10**9, "74.5 GiB"),
        (2**61, "2,048 PiB"),
    ],
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text
