"""packattn.plotting draws what the mask and the reports say, without pyplot."""

import builtins
import subprocess
import sys

import pytest
import torch

import packattn
from packattn import Packing, plotting
from packattn.verify import check_attention, probe

figures = pytest.importorskip("matplotlib.figure")


def image_of(axes):
    """The colours of the picture's cells, [rows, columns, 3]."""
    return torch.tensor(axes.images[0].get_array().data)


def colour(name):
    import matplotlib as mpl

    return torch.tensor(mpl.colors.to_rgb(name), dtype=torch.float64)


def is_white(image):
    return (image == 1).all(-1)


def saved(figure, path):
    figure.savefig(path, dpi=50)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window_size": (1, 0)}, {"chunk_size": 2}, {"prefix_lengths": torch.tensor([2, 0, 0, 1])}],
    ids=str,
)
def test_mask_has_a_coloured_cell_where_a_key_is_seen(options, tmp_path):
    packing = Packing.from_lengths([4, 0, 1, 3], total=10)
    figure = plotting.plot_mask(packing, **options)
    strip, axes = figure.axes
    image = image_of(axes)
    padding = packing.is_padding[:, None] | packing.is_padding
    grey = (image - colour(plotting.style.PADDING)).abs().amax(-1) < 1e-6
    assert torch.equal(~is_white(image) & ~grey, packattn.dense_mask(packing, **options))
    assert torch.equal(grey, padding)
    first, one = image[0, 0], image[4, 4]
    assert not torch.equal(first, one), "neighbouring documents have different colours"
    # The positions above it: a piece for each document and the padding, each from 0.
    pieces = [line for line in strip.lines if line.get_linestyle() != "None"]
    assert [line.get_ydata().tolist() for line in pieces] == [[0, 1, 2, 3], [0], [0, 1, 2], [0, 1]]
    assert [text.get_text() for text in axes.texts] == ["0: 4 tokens", "2: 1 token", "3: 3 tokens"]
    assert "3 documents, 10 tokens, 2 of them padding" in strip.get_title()
    saved(figure, tmp_path / "mask.png")


def test_mask_of_a_long_row_is_sampled(tmp_path):
    packing = Packing.from_lengths([3000, 5000, 1, 1999])
    figure = plotting.plot_mask(packing, title="long")
    image = image_of(figure.axes[1])
    assert image.shape[:2] == (1024, 1024) and figure.axes[0].get_title() == "long"
    assert not is_white(image)[10, 5] and is_white(image)[5, 10] and is_white(image)[1000, 5]
    saved(figure, tmp_path / "mask.png")


def test_mask_of_many_documents_and_of_other_keys(tmp_path):
    saved(plotting.plot_mask(Packing.from_lengths([8] * 300)), tmp_path / "many.png")
    queries, keys = Packing.from_lengths([2, 3]), Packing.from_lengths([4, 1])
    figure = plotting.plot_mask(queries, packing_k=keys)
    assert torch.equal(~is_white(image_of(figure.axes[1])), packattn.dense_mask(queries, keys))
    with pytest.raises(ValueError, match="nothing to draw"):
        plotting.plot_mask(Packing.from_lengths([0, 0]))


def plain(q, k, v, packing):
    x, y, z = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_attention_report_is_drawn_expected_against_found(tmp_path):
    report = check_attention(plain, (3, 2), tail=0, heads=(2, 1))
    figure = plotting.plot_influence(report, title="plain causal")
    expected, replaced, gradients = figure.axes[:3]
    assert [axes.get_title().split("\n")[0] for axes in (expected, replaced, gradients)] == [
        "expected",
        "found by replacing keys",
        "found by gradients",
    ]
    assert torch.equal(~is_white(image_of(expected)), report.expected)
    blue = (image_of(replaced) - colour(plotting.style.ALLOWED)).abs().amax(-1) < 1e-6
    assert torch.equal(blue, report.expected)
    assert torch.equal(~is_white(image_of(replaced)), torch.ones(5, 5).tril().bool())
    assert replaced.get_title().endswith(f"leak {report.influence.masked_fill(report.expected, 0).max():.3g}")
    saved(figure, tmp_path / "influence.png")


def test_what_is_missing_is_crossed(tmp_path):
    report = check_attention(lambda q, k, v, p: (q * 0 + v[:, :1]).clone(), (2, 2), tail=0, heads=(2, 1))
    figure = plotting.plot_influence(report)
    replaced = figure.axes[1]
    assert replaced.collections[-1].get_offsets().tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert "leak exactly 0, 2 missing" in replaced.get_title()
    assert "missing" in [text.get_text() for text in figure.legends[0].get_texts()]
    saved(figure, tmp_path / "influence.png")


class Mean(torch.nn.Module):
    """Logits of a token: its own embedding, plus a share of the row's mean."""

    def __init__(self, share):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.share = torch.nn.Embedding(9, 5), share

    def forward(self, input_ids, position_ids, packing):
        x = self.embedding(input_ids)
        return x + self.share * x.mean(1, keepdim=True)


def test_probe_reports_side_by_side_share_a_scale(tmp_path):
    documents = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 0])]
    reports = {name: probe(Mean(share), documents) for name, share in (("a", 0.5), ("b", 0.05), ("c", 0.0))}
    figure = plotting.plot_influence(reports)
    a, b, c = figure.axes[:3]
    assert a.get_title() == f"a\nleak {reports['a'].leak:.3g}" and c.get_title() == "c\nleak exactly 0"
    assert torch.equal(~is_white(image_of(c)), torch.eye(3).bool())
    off = ~torch.eye(3).bool()
    assert (image_of(a)[off].sum() < image_of(b)[off].sum()).item(), "a larger leak is darker"
    # Row: whose logits; column: which document was replaced.
    assert a.texts[1].get_text() == f"{reports['a'].influence[1, 0]:.2g}"
    assert (a.get_ylabel(), a.get_xlabel()) == ("logits of document", "document replaced")
    assert len(figure.axes) == 4, "one colour bar"
    assert len(plotting.plot_influence(reports["c"]).axes) == 1, "no leak, no scale"
    saved(figure, tmp_path / "probe.png")


def test_matrices_nan_and_infinity(tmp_path):
    matrix = torch.eye(3)
    matrix[0, 2], matrix[1, 0], matrix[2, 1] = float("inf"), float("nan"), 1e-12
    figure = plotting.plot_influence(matrix)
    image = image_of(figure.axes[0])
    assert torch.equal(~is_white(image), matrix != 0), "even the smallest leak is not white"
    assert "not measured" in figure.axes[0].get_title()
    saved(figure, tmp_path / "matrix.png")
    visible = torch.ones(3, 3).tril().bool()
    assert "leak exactly 0" in plotting.plot_influence(visible.double(), expected=visible).axes[0].get_title()
    saved(plotting.plot_influence(torch.full((2, 2), float("nan"))), tmp_path / "nan.png")
    for wrong, error in (({}, ValueError), (torch.ones(3), ValueError), ("report", TypeError)):
        with pytest.raises(error, match="found must"):
            plotting.plot_influence(wrong)
    with pytest.raises(ValueError, match="expected must be bool"):
        plotting.plot_influence(matrix, expected=torch.ones(2, 2, dtype=torch.bool))


LENGTHS = [5, 4, 3, 3, 9, 2, 0, 2, 1, 7]


def bars(axes):
    """(left edge, bottom, width, height) of every bar that has a height."""
    found = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in axes.patches]
    return [bar for bar in found if bar[3]]


def test_bins_show_their_documents_and_cost(tmp_path):
    bins = packattn.pack(LENGTHS, 10)
    figure = plotting.plot_bins(bins, title="rows")
    top, bottom = figure.axes
    grey, documents = bars(top)[: bins.num_bins], bars(top)[bins.num_bins :]
    assert {bar[3] for bar in grey} == {10}
    assert sorted(bar[3] for bar in documents) == sorted(n for n in LENGTHS if n)
    ends = [sum(bar[3] for bar in documents if round(bar[0] + 0.45) == b) for b in range(bins.num_bins)]
    assert ends == bins.tokens.tolist()
    assert [bar[3] for bar in bars(bottom)] == bins.costs.tolist()
    assert bottom.lines[0].get_ydata()[0] == bins.costs.mean()
    assert (
        f"10 documents in {bins.num_bins} rows of 10" in top.get_title() and f"{bins.fill:.2%} full" in top.get_title()
    )
    saved(figure, tmp_path / "bins.png")


def test_many_bins_are_sorted_and_several_packings_side_by_side(tmp_path):
    lengths = torch.randint(1, 50, (5000,), generator=torch.Generator().manual_seed(0)).tolist()
    found = {name: packattn.pack(lengths, 64, name) for name in ("bfd", "next_fit")}
    figure = plotting.plot_bins(found)
    for axes, bins in zip(figure.axes[:2], found.values(), strict=True):
        grey, full = [p for p in axes.patches[:512]], [p for p in axes.patches[512:]]
        assert len(grey) == len(full) == 512
        heights = [p.get_height() for p in full]
        assert heights == sorted(heights, reverse=True) and axes.get_title().startswith(("bfd", "next_fit"))
        area = sum(p.get_height() * p.get_width() for p in full)
        assert abs(area - sum(lengths)) < 1e-6 * area, bins
    saved(figure, tmp_path / "bins.png")


def test_bins_that_cannot_be_drawn():
    with pytest.raises(TypeError, match="what packattn.pack returns, got list"):
        plotting.plot_bins([[1]])
    with pytest.raises(ValueError, match="empty mapping"):
        plotting.plot_bins({})
    with pytest.raises(ValueError, match="at least one bin, got none in 'a'"):
        plotting.plot_bins({"a": packattn.pack([], 4)})
    plotting.plot_bins(packattn.pack([0, 0], 4))


def test_draws_into_a_given_figure(tmp_path):
    figure = figures.Figure(figsize=(8, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    assert plotting.plot_mask(Packing.from_lengths([3, 2]), figure=top) is top
    assert plotting.plot_influence({"one": torch.eye(2), "two": torch.ones(2, 2)}, figure=bottom) is bottom
    saved(figure, tmp_path / "both.png")


def test_pyplot_is_not_touched_and_matplotlib_not_imported_early():
    code = (
        "import sys, packattn; from packattn import plotting\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plotting.plot_mask(packattn.Packing.from_lengths([2, 1]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r'packattn.plotting needs matplotlib: pip install "packattn\[plot\]"'):
        plotting.plot_mask(Packing.from_lengths([2, 1]))
    with pytest.raises(ImportError, match="needs matplotlib"):
        plotting.plot_influence(torch.eye(2))
