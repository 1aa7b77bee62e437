"""packattn plot: what it draws is what the arguments say, and what it cannot read or write it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packattn
from packattn import Packing, cli, plotting
from packattn.cli import values

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, dict[str, Any]]]:
    """What the plotting functions are called with."""
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[Any, dict[str, Any]]] = []
    for name in ("plot_mask", "plot_bins", "plot_influence"):
        original = getattr(plotting, name)

        def record(first: Any, original: Any = original, **options: Any) -> Any:
            calls.append((first, options))
            return original(first, **options)

        monkeypatch.setattr(plotting, name, record)
    return calls


def plot(*arguments: object) -> int:
    return cli.main(["plot", *map(str, arguments)])


def spans(packing: Packing) -> list[tuple[int, int]]:
    return [(rows.start, rows.stop) for rows in packing.documents()]


@pytest.mark.parametrize(
    ("arguments", "documents", "total"),
    [
        (["--lengths", "5,4,3"], [(0, 5), (5, 9), (9, 12)], 12),
        (["--lengths", "5, 4", "--total", 11], [(0, 5), (5, 9)], 11),
        (["--cu-seqlens", "0 2 5"], [(0, 2), (2, 5)], 5),
        (["--position-ids", "0,1,2,0,1"], [(0, 3), (3, 5)], 5),
        (["--position-ids", "0,1,50,0,1", "--rule", "zero"], [(0, 3), (3, 5)], 5),
        (["--segment-ids", "0,0,1"], [(0, 2), (2, 3)], 3),
        (["--segment-ids", "7,1,1,7", "--pad-id", 7], [(1, 3)], 4),
        (["--attention-mask", "1,1,2,2,0"], [(0, 2), (2, 4)], 5),
    ],
    ids=str,
)
def test_mask(drawn: Any, arguments: list[Any], documents: Any, total: int, capsys: Any) -> None:
    assert plot("mask", *arguments) == 0
    packing, options = drawn[0]
    assert (spans(packing), packing.total) == (documents, total)
    assert options == {"causal": True, "window_size": (-1, -1), "chunk_size": 0, "title": None}
    assert Path("packattn-mask.png").stat().st_size > 1000
    assert capsys.readouterr().out == f"Picture: packattn-mask.png\n{packing!r}\n"


def test_mask_pattern_and_formats(drawn: Any) -> None:
    assert (
        plot("mask", "--lengths", "5,4", "--window", "2,1", "--bidirectional", "--title", "<ä & 日>", "-o", "a.svg")
        == 0
    )
    assert drawn[-1][1] == {"causal": False, "window_size": (2, 1), "chunk_size": 0, "title": "<ä & 日>"}
    assert "<svg" in Path("a.svg").read_text(encoding="utf-8")
    assert plot("mask", "--lengths", "5,4", "--window", "3", "--chunk", "2", "-o", "a.pdf") == 0
    assert drawn[-1][1]["window_size"] == (3, 3) and drawn[-1][1]["chunk_size"] == 2


@pytest.mark.parametrize("kind", ["npy", "npy int32", "json", "txt", "csv"])
def test_files(drawn: Any, kind: str) -> None:
    batch = [[0, 1, 2, 0], [0, 1, 0, 1]]
    file = Path(f"batch.{kind.split()[0]}")
    if file.suffix == ".npy":
        np.save(file, np.array(batch, dtype=np.int32 if "int32" in kind else np.int64))
    elif kind == "json":
        file.write_text(json.dumps(batch))
    else:
        file.write_text("\n".join((", " if kind == "csv" else " ").join(map(str, row)) for row in batch))
    assert plot("mask", "--position-ids", file) == 0
    assert spans(drawn[0][0]) == [(0, 3), (3, 4), (4, 6), (6, 8)]


def test_lengths_in_a_column_and_in_a_line(tmp_path: Path) -> None:
    for text in ("5\n4\n3\n", "5 4 3", "5,4,3,\n", "\n5\n\n4\n3"):
        (tmp_path / "l.txt").write_text(text)
        assert values.integers("x", str(tmp_path / "l.txt")).tolist() == [5, 4, 3]
    assert values.integers("x", "-1,0").tolist() == [-1, 0]
    np.save(tmp_path / "m.npy", np.array([[True, False]]))
    assert values.integers("x", str(tmp_path / "m.npy")).tolist() == [[1, 0]]
    np.save(tmp_path / "f.npy", np.array([2.0, 1.0]))
    assert values.integers("x", str(tmp_path / "f.npy")).tolist() == [2, 1]


def test_bins(drawn: Any, capsys: Any) -> None:
    Path("lengths.txt").write_text("\n".join(map(str, [5, 4, 3, 9, 2])))
    assert plot("bins", "lengths.txt", "--capacity", 10, "--algorithm", "bfd, next_fit") == 0
    found = drawn[0][0]
    assert list(found) == ["bfd", "next_fit"]
    assert found["bfd"].tokens.tolist() == packattn.pack([5, 4, 3, 9, 2], 10).tokens.tolist()
    assert "bfd: Bins(num_bins=3" in capsys.readouterr().out
    assert plot("bins", "20,3", "--capacity", 10, "--overflow", "split", "--seed", 1, "-o", "b.png") == 0
    assert plot("bins", "5,4,3", "--capacity", 10, "--algorithm", "balanced", "--num-bins", 2) == 0
    assert drawn[-1][0]["balanced"].num_bins == 2


def test_influence(drawn: Any, capsys: Any) -> None:
    assert plot("influence", "--lengths", "3,2", "--window", "1") == 0
    assert drawn[-1][0].passed and drawn[-1][0].expected.sum() == 8
    assert plot("influence", "--lengths", "3,2", "--function", "causal") == 1
    assert not drawn[-1][0].passed
    assert "attention: FAILED" in capsys.readouterr().out
    Path("mine_to_draw.py").write_text("import packattn\nclass C:\n    f = staticmethod(packattn.attention)\n")
    assert plot("influence", "--function", "mine_to_draw:C.f") == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mask", "--lengths", "3,x"], "--lengths must be whole numbers"),
        (["mask", "--lengths", "3", "--total", "2"], "total"),
        (["mask", "--lengths", "3,-1"], "-1"),
        (["mask", "--lengths", "0,0"], "nothing to draw"),
        (["mask", "--lengths", "99999999999999999999"], "whole numbers, got 99999999999999999999"),
        (["mask", "--cu-seqlens", "1,2"], "start at 0"),
        (["mask", "--position-ids", "0,1", "--total", "5"], "--total goes with --lengths"),
        (["mask", "--lengths", "3", "--pad-id", "0"], "--pad-id goes with --segment-ids"),
        (["mask", "--position-ids", "none.npy"], "there is no file 'none.npy'"),
        (["mask", "--position-ids", "cube.npy"], r"a list \[N\] or a batch \[B, S\], got 3 dimensions"),
        (["mask", "--lengths", "flat.npy"], r"a list \[N\], got 2 dimensions"),
        (["mask", "--position-ids", "half.npy"], "whole numbers, got 0.5 at place 1"),
        (["mask", "--position-ids", "pickle.npy"], "is no .npy file of numbers"),
        (["mask", "--position-ids", "noise.npy"], "is no .npy file of numbers"),
        (["mask", "--position-ids", "bad.json"], "is no JSON"),
        (["mask", "--position-ids", "dict.json"], "must hold a list, got dict"),
        (["mask", "--position-ids", "ragged.json"], "equally long"),
        (["mask", "--position-ids", "words.txt"], "whole numbers"),
        (["mask", "--position-ids", "latin.txt"], "is no text"),
        (["mask", "--lengths", "3", "-o", "picture"], "must end with one of"),
        (["mask", "--lengths", "3", "-o", "picture.exe"], "must end with one of"),
        (["bins", "5,4", "--capacity", "3"], "at most capacity"),
        (["bins", "5,4", "--capacity", "0"], "capacity"),
        (["bins", "5,4", "--capacity", "9", "--algorithm", "best"], "--algorithm must be of bfd"),
        (["influence", "--lengths", "3"], "two documents"),
        (["influence", "--lengths", "300,3"], "at most 200 tokens"),
        (["influence", "--function", "nonsense"], "packattn, causal or MODULE:NAME"),
        (["influence", "--function", "no_such_module_here:f"], "No module named"),
        (["influence", "--function", "math:no_such_name"], "no attribute"),
        (["influence", "--function", "math:pi"], "must name something callable"),
        (["influence", "--function", "math:sqrt"], "sqrt"),
    ],
    ids=str,
)
def test_refusals(drawn: Any, capsys: Any, arguments: list[str], words: str) -> None:
    np.save("cube.npy", np.zeros((1, 2, 3), dtype=int))
    np.save("flat.npy", np.zeros((2, 3), dtype=int))
    np.save("half.npy", np.array([0, 0.5]))
    np.save("pickle.npy", np.array([object()]), allow_pickle=True)
    Path("noise.npy").write_bytes(b"\x00\x01")
    Path("bad.json").write_text("[1,")
    Path("dict.json").write_text("{}")
    Path("ragged.json").write_text("[[1, 2], [3]]")
    Path("words.txt").write_text("0 1\ntwo 3")
    Path("latin.txt").write_bytes(b"\xff\xfe1 2")
    assert plot(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"packattn plot {arguments[0]}: ") and error.count("\n") == 1
    assert re.search(words, error), error
    assert not list(Path().glob("packattn-*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mask"], "one of the arguments"),
        (["mask", "--lengths", "3", "--cu-seqlens", "0,3"], "not allowed with"),
        (["mask", "--lengths", "3", "--window", "a"], "wanted LEFT or LEFT,RIGHT"),
        (["mask", "--lengths", "3", "--window", "1,2,3"], "wanted LEFT or LEFT,RIGHT"),
        (["mask", "--lengths", "3", "--window=-2"], "wanted LEFT or LEFT,RIGHT"),
        (["mask", "--lengths", "3", "-o", "no/folder/a.png"], "a folder that exists"),
        (["mask", "--lengths", "3", "-o", "."], "got the folder"),
        (["bins", "3"], "--capacity"),
        ([], "picture"),
    ],
    ids=str,
)
def test_wrong_usage(drawn: Any, capsys: Any, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        plot(*arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_help_has_examples_that_parse(capsys: Any) -> None:
    """Of every command that has some."""
    from importlib import import_module

    for name, module in cli.COMMANDS.items():
        examples = getattr(import_module(module), "EXAMPLES", "")
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert examples.strip().splitlines()[0] in capsys.readouterr().out if examples else True
        for line in examples.splitlines():
            command = re.split(r"\s{2,}", line)[0].split()
            assert command[0] == "packattn"
            cli.build_parser().parse_args(command[1:])


def test_long_rows_take_no_time(drawn: Any) -> None:
    lengths = torch.randint(1, 100, (20_000,), generator=torch.Generator().manual_seed(0))
    np.save("l.npy", lengths.numpy())
    assert plot("mask", "--lengths", "l.npy") == 0
    assert plot("bins", "l.npy", "--capacity", 4096) == 0
