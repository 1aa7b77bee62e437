"""The command line: info with and without the compiled libraries, the demo and its exit status, the corpus."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import packattn
from packattn import _library, cli
from packattn.cli import demo, demo_corpus, demo_data, demo_model, demo_picture, demo_proof, demo_speed, info, tables
from packattn.cli.progress import Progress

PACKAGE = Path(packattn.__file__).resolve().parent


def command(*arguments: object, native: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m packattn` as users do, in a process of its own."""
    env = {**os.environ, **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [env.get("PYTHONPATH")])])
    env.pop("PACKATTN_NATIVE", None)
    if not native:
        env["PACKATTN_NATIVE"] = "off"
    return subprocess.run(
        [sys.executable, "-m", "packattn", *map(str, arguments)],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


# ---- the command itself --------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip() == f"packattn {packattn.__version__}"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "invalid choice"),
        ([], "required"),
        (["demo", "--steps", "0"], "argument --steps: wanted a whole number from 1 to 1000000000, got 0"),
        (["demo", "--steps", "x"], "argument --steps: wanted a whole number from 1"),
        (["demo", "--seed", "99999999999999999999"], "argument --seed: wanted a whole number from 0 to 4294967295"),
        (["info", "--nonsense"], "unrecognized"),
    ],
    ids=str,
)
def test_wrong_usage_is_status_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "usage: packattn" in error and words in error


# ---- info ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not _library.CPU.loaded or _library.extension is None, reason="no compiled libraries")
def test_info_with_the_compiled_libraries() -> None:
    result = command("info")
    assert result.returncode == 0, result.stderr
    assert "NOT in use" not in result.stdout
    assert f"packattn {packattn.__version__}, torch {torch.__version__}" in result.stdout
    assert str(_library.CPU.path) in result.stdout
    assert "built with" in result.stdout

    facts = json.loads(command("info", "--json").stdout)
    assert facts["native"] is True
    loaded = {library["name"]: library["loaded"] for library in facts["libraries"]}
    assert loaded == {"packattn_cpu": True, "packattn_cuda": _library.CUDA.loaded, "packattn._C": True}
    assert all(library["loaded"] == (library["missing"] is None) for library in facts["libraries"])
    assert facts["cpu"]["isa"] in facts["cpu"]["available"]
    assert facts["build"]["torch_version"]
    assert facts["cuda"]["built"] or facts["cuda"]["reason"]


@pytest.mark.skipif(not _library.CPU.loaded or _library.extension is None, reason="no compiled libraries")
def test_info_shows_a_forced_instruction_set() -> None:
    facts = json.loads(command("info", "--json", PACKATTN_CPU_ISA="portable").stdout)
    assert facts["cpu"]["isa"] == "portable"
    kernels = {row["kernel"] for row in facts["kernels"] if row["device"] == "cpu"}
    assert kernels == {"compiled, portable", info.REFERENCE}
    assert "portable (forced by PACKATTN_CPU_ISA)" in command("info", PACKATTN_CPU_ISA="portable").stdout


@pytest.mark.skipif(not _library.CPU.loaded or _library.extension is None, reason="no compiled libraries")
def test_info_survives_an_unknown_instruction_set() -> None:
    result = command("info", PACKATTN_CPU_ISA="z80")
    assert result.returncode == 0, result.stderr
    assert re.search(r"CPU instruction set +none: .*z80", result.stdout)


def test_info_without_the_compiled_libraries() -> None:
    result = command("info", native=False)
    assert result.returncode == 0, result.stderr
    # said before anything but the versions
    assert "NOT in use" in result.stdout.split("\n\n")[1]
    assert "PACKATTN_NATIVE" in result.stdout.split("\n\n")[1]
    assert "compiled kernels" in result.stdout

    facts = json.loads(command("info", "--json", native=False).stdout)
    assert facts["native"] is False
    assert all(not library["loaded"] and library["missing"] for library in facts["libraries"])
    assert facts["build"] is None
    assert {row["kernel"] for row in facts["kernels"]} == {info.REFERENCE}
    assert all(row["compiled_head_dims"] == "none" for row in facts["support"])


@pytest.mark.skipif(not _library.CPU.loaded or _library.extension is None, reason="no compiled libraries")
def test_the_kernel_table_is_what_the_deciding_function_says() -> None:
    for row in info.collect()["kernels"]:
        refusals = {"cpu": _library.extension.cpu_refusals, "cuda": _library.extension.cuda_refusals}[row["device"]]
        reasons = refusals(row["dtype"], row["head_dim"], row["head_dim"])
        if row["device"] == "cuda" and not _library.CUDA.loaded:
            reasons = [_library.CUDA.missing]
        assert row["reasons"] == reasons
        assert (row["kernel"] == info.REFERENCE) == bool(reasons)


@pytest.mark.skipif(_library.extension is None, reason="no compiled libraries")
def test_the_cuda_kernels_that_would_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the function with which the CUDA op decides, which needs no GPU and no CUDA build."""
    kernel = _library.extension.cuda_kernel
    assert kernel("bfloat16", 64, 64, 80) == ("sm80 64", [])
    assert kernel("float16", 72, 80, 90)[0] == "sm80 96"
    assert kernel("bfloat16", 192, 128, 80)[0] == "sm80 192/128"
    assert kernel("bfloat16", 256, 8, 120)[0] == "sm80 256"
    for dtype, head_dim, capability, reason in (
        ("float32", 64, 80, "float32"),
        ("bfloat16", 264, 80, "up to 256"),
        ("bfloat16", 64, 75, "this device has 7.5"),
    ):
        name, reasons = kernel(dtype, head_dim, head_dim, capability)
        assert name == "plain" and reason in " ".join(reasons)
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "plain")
    assert kernel("bfloat16", 64, 64, 80)[0] == "plain"
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm80")
    with pytest.raises(ValueError, match="PACKATTN_CUDA_KERNEL=sm80, but dtype: .* not float32"):
        kernel("float32", 64, 64, 80)
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm90")
    assert kernel("bfloat16", 96, 96, 90)[0] == "sm90 128"
    with pytest.raises(ValueError, match="PACKATTN_CUDA_KERNEL=sm90, but device: .* 9.0, this device has 8.0"):
        kernel("bfloat16", 64, 64, 80)
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "volta")
    with pytest.raises(ValueError, match='PACKATTN_CUDA_KERNEL must be auto, plain, sm80 or sm90, got "volta"'):
        kernel("float32", 64, 64, 80)


@pytest.mark.skipif(_library.extension is None, reason="no compiled libraries")
def test_sm90_without_its_kernels_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call itself would raise; info says so before it."""
    monkeypatch.setenv("PACKATTN_CUDA_KERNEL", "sm90")
    monkeypatch.setattr(info, "_capability", lambda: 90)
    facts = _library.extension.build_info()
    for archs, kernel in (("8.0 9.0a+PTX", "compiled, sm90 64"), ("8.0 9.0", "none")):
        monkeypatch.setattr(
            _library.extension, "build_info", lambda a=archs: facts | {"cuda": True, "cuda_arch_list": a}
        )
        name, reasons = info._compiled_for("bfloat16", 64, 64, "cuda")
        assert name == kernel and ("built for 8.0 9.0, not 9.0a" in " ".join(reasons)) == (kernel == "none")


@pytest.mark.skipif(_library.extension is None, reason="no compiled libraries")
def test_info_says_why_there_is_no_cuda_part() -> None:
    facts, text = info.collect(), info.text(info.collect())
    assert ("none here" in text) == (_library.CUDA.missing is not None)
    if torch.version.cuda is None:
        assert "missing: this torch is built without CUDA" in text
    rows = {row["dtype"]: row["compiled_head_dims"] for row in facts["support"] if row["device"] == "cuda"}
    assert rows["bfloat16"] == "multiples of 8 up to 512; tensor cores: multiples of 8 up to 256"
    assert rows["float32"] == "multiples of 8 up to 512" and rows["float64"] == "none"


def test_head_dims_are_spelled_as_a_rule_where_they_follow_one() -> None:
    assert info._spell([]) == "none"
    assert info._spell([8, 16, 24]) == "multiples of 8 up to 24"
    assert info._spell(list(range(1, info._MAX_HEAD_DIM + 1))) == "all"
    assert info._spell([64, 128, 256]) == "64, 128, 256"


# ---- demo ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("demo")
    result = command("demo", "--quick", "--picture", folder / "demo.png", "--json", folder / "demo.json")
    return result, folder


def test_quick_demo_proves_what_it_should(quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, folder = quick
    assert result.returncode == 0, result.stdout + result.stderr
    facts = json.loads((folder / "demo.json").read_text())
    assert facts["passed"] is True
    plain, reset, packed = facts["proof"]
    assert plain["leak"] > 0 and reset["leak"] > 0
    assert plain["gradient_leak"] > 0 and reset["gradient_leak"] > 0
    assert packed["leak"] == 0 and packed["gradient_leak"] == 0
    assert packed["max_relative_error"] < 1e-4 < reset["max_relative_error"]
    assert facts["fill"] > 0.95 > facts["padded_fill"]
    training = facts["training"]
    assert training["held_out_after"] < training["held_out_before"] - 1
    losses = [speed["loss"] for speed in facts["speed"]]
    assert max(losses) - min(losses) < 1e-3
    assert len({speed["tokens"] for speed in facts["speed"]}) == 1


def test_quick_demo_prints_its_tables(quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    lines = quick[0].stdout.splitlines()
    leaks = {line.split()[0]: line for line in lines if re.match(r"  \([abc]\) .* (LEAKS|clean)$", line)}
    assert re.search(r" [1-9]\.\de[+-]\d\d .* LEAKS$", leaks["(a)"])
    assert re.search(r" [1-9]\.\de[+-]\d\d .* LEAKS$", leaks["(b)"])
    assert re.search(r"  0 +0 +\S+ +clean$", leaks["(c)"])
    for name in ("packattn, packed rows", "SDPA, padded batches", "SDPA, dense document mask"):
        assert any(re.match(rf"  {name} +\d+\.\d% +[\d,]+ +[\d,]+ +(\d+\.\dx)? +\d\.\d+", line) for line in lines), name
    assert any(re.match(r"  step +12/12  loss \d\.\d+  [\d,]+ tokens/s", line) for line in lines)
    assert any(line.startswith("Result after") and "leaks exactly 0" in line for line in lines)
    assert max(map(len, lines)) <= 130


def test_quick_demo_draws_a_picture(quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    image = pytest.importorskip("matplotlib.image")
    pixels = image.imread(quick[1] / "demo.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    assert pixels[..., :3].std() > 0.05  # something is drawn


def small_demo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The demo in this process, as small as it can be."""
    tiny = demo.Settings(
        capacity=192,
        steps=2,
        max_documents=150,
        held_out=20,
        speed_rows=1,
        speed_repeats=1,
        model=demo_model.Config(width=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=32),
    )
    monkeypatch.setattr(demo, "QUICK", tiny)
    return cli.main(["demo", "--quick", "--no-picture", *arguments])


def test_demo_status_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    random_state = torch.get_rng_state()
    assert small_demo(monkeypatch) == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert "leaks exactly 0" in capsys.readouterr().out


def test_demo_status_1_if_packattn_leaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # leaks a little, and only where several documents share a row
    real = packattn.attention

    def leaky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: packattn.Packing) -> torch.Tensor:
        return real(q, k, v, packing) + (1e-3 * v.mean() if packing.num_documents > 1 else 0.0)

    monkeypatch.setattr(packattn, "attention", leaky)
    monkeypatch.setattr(demo_speed, "_compare", lambda losses: None)
    assert small_demo(monkeypatch) == 1
    assert re.search(r"Result after .*: packattn LEAKS: replacing a document moved", capsys.readouterr().out)


def test_demo_status_1_if_packed_is_not_unpacked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = packattn.attention
    monkeypatch.setattr(
        packattn,
        "attention",
        lambda q, k, v, packing: real(q, k, v, packing) * (1.1 if packing.num_documents > 1 else 1.0),
    )
    monkeypatch.setattr(demo_speed, "_compare", lambda losses: None)
    assert small_demo(monkeypatch) == 1
    assert "packattn fails: packed logits differ" in capsys.readouterr().out


def test_demo_status_1_if_the_probe_is_blind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # (a) and (b) leak nothing if they too run with packattn: then the probe has shown nothing
    monkeypatch.setattr(demo_proof, "_running_positions", demo_proof._packattn)
    monkeypatch.setattr(demo_proof, "_reset_positions", demo_proof._packattn)
    assert small_demo(monkeypatch) == 1
    assert "it could not see anything" in capsys.readouterr().out


def test_demo_status_1_if_the_losses_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = demo_model.causal
    monkeypatch.setattr(demo_model, "causal", lambda q, k, v: 2 * real(q, k, v))
    assert small_demo(monkeypatch) == 1
    assert re.search(r"SDPA, padded batches: wanted the loss \d+\.\d+ within", capsys.readouterr().err)


def test_demo_status_1_without_a_corpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python313.zip")})
    assert small_demo(monkeypatch) == 1
    assert "python313.zip" in capsys.readouterr().err


def test_demo_says_how_to_get_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.figure"):  # the second may be imported already
        monkeypatch.setitem(sys.modules, name, None)
    message = demo_picture.draw(tmp_path / "x.png", [torch.arange(3), torch.arange(4)], [])
    assert "pip install" in message and "matplotlib" in message
    assert not (tmp_path / "x.png").exists()


# ---- corpus and rows -----------------------------------------------------------------------------------------------


def test_corpus_is_deterministic_and_long_tailed() -> None:
    corpus = demo_corpus.load()
    lengths = torch.tensor([len(text) for text in corpus.documents], dtype=torch.float64)
    assert len(lengths) > 3000
    assert len(set(corpus.documents)) == len(corpus.documents)
    assert lengths.max() > 10 * lengths.median()
    assert corpus.documents[:500] == demo_corpus.load(max_documents=500).documents
    training, held_out = corpus.split(40, seed=1)
    assert (training, held_out) == corpus.split(40, seed=1)
    assert held_out != corpus.split(40, seed=2)[1]
    assert len(held_out) == 40 and set(training).isdisjoint(held_out)


def test_corpus_passes_over_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""The first docstring."""\n\ndef f():\n    """The second docstring."""\n')
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "c.py").write_bytes(b'"""bytes \xff that are no UTF-8"""\n')
    (tmp_path / "d.py").write_text('"""short"""\nclass A:\n    """The first docstring."""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "e.py").write_text('"""Not read: a test."""\n')
    corpus = demo_corpus.load(tmp_path)
    assert corpus.documents == [b"The first docstring.", b"The second docstring."]
    assert (corpus.files, corpus.unreadable) == (4, 2)
    with pytest.raises(demo_corpus.CorpusError, match="wanted .py files with docstrings under"):
        demo_corpus.load(tmp_path / "nothing")


def test_encoding() -> None:
    assert demo_corpus.encode(b"ab").tolist() == [demo_corpus.BOS, 97, 98, demo_corpus.EOS]


def test_packed_rows_hold_every_token_once() -> None:
    documents = [torch.arange(1, 1 + n) for n in (5, 9, 3, 1, 8)]
    rows = demo_data.assign(documents, capacity=8)
    assert sorted(sum(len(d) for d in row) for row in rows) != []
    batch = demo_data.pack_rows(rows, capacity=8)
    assert batch.tokens.shape == (8 * len(rows),)
    assert batch.real_tokens == 26 == int((~batch.packing.is_padding).sum())
    for where, document in zip(batch.packing.documents(), batch.documents, strict=True):
        assert torch.equal(batch.tokens[where], document)
        assert batch.labels[where].tolist() == [-100, *document[1:].tolist()]
    assert (batch.labels[batch.packing.is_padding] == -100).all()


def test_padded_batches_hold_every_token_once() -> None:
    documents = [torch.arange(1, 1 + n) for n in (5, 9, 3)]
    first, second = demo_data.pad(documents, batch_size=2)
    assert first.tokens.shape == (2, 9) and second.tokens.shape == (1, 3)
    assert first.labels[0].tolist() == [-100, 2, 3, 4, 5, -100, -100, -100, -100]


# ---- the model -----------------------------------------------------------------------------------------------------


def test_model_gives_the_same_logits_with_every_attention() -> None:
    torch.manual_seed(0)
    model = demo_model.Decoder(demo_model.Config(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=48))
    documents = [torch.randint(256, (n,)) for n in (7, 20, 5)]
    batch = demo_data.pack_rows([documents], capacity=40)
    packed = model(batch.tokens, batch.packing.position_ids, demo_model.packed(batch.packing))
    mask = packattn.dense_mask(batch.packing) | torch.eye(40, dtype=torch.bool)
    dense = model(batch.tokens, batch.packing.position_ids, demo_model.masked(mask))
    for where, document in zip(batch.packing.documents(), documents, strict=True):
        alone = model(document[None], torch.arange(len(document))[None], demo_model.causal)[0]
        torch.testing.assert_close(packed[where], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dense[where], alone, rtol=1e-4, atol=1e-5)


# ---- text ----------------------------------------------------------------------------------------------------------


def test_tables_align() -> None:
    assert tables.render(("name", "n"), [("a", 1), ("bcdef", 100)], align="<>").splitlines() == [
        "  name     n",
        "  -----  ---",
        "  a        1",
        "  bcdef  100",
    ]
    assert tables.pairs([("a", "x\ny"), ("bc", "")]).splitlines() == ["  a   x", "      y", "  bc"]
    assert (tables.scientific(0.0), tables.scientific(0.0123), tables.count(12345.6)) == ("0", "1.2e-02", "12,346")


def test_progress_off_a_terminal_prints_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100, "step") as progress:
        for _ in range(100):
            progress.advance("x")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  step   1/100  x" and lines[-1] == "  step 100/100  x"
    assert 3 <= len(lines) <= 10


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(10, "step") as progress:
        for _ in range(10):
            progress.advance("x")
    captured = capsys.readouterr()
    assert "step:" in captured.err and "|" in captured.err
    assert captured.out.splitlines()[-1] == "  step 10/10  x"
